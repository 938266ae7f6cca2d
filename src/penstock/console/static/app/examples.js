// Commands for readers who have nothing to look at yet: with this server's address, and a provider and a model that it has.
import { address } from "./api.js";
import { namedModels } from "./new_job/draft.js";
import { me } from "./store.js";

/** This server's address, as commands and clients take it. */
const server = () => address("").href.replace(/\/$/, "");

function asked() {
  const providers = me.value?.providers ?? [];
  const provider = providers.find((each) => namedModels(each).length) ?? providers[0];
  return { provider: provider?.name ?? "default", model: namedModels(provider)[0] ?? "MODEL" };
}

/** A job from a terminal. A server without a provider has Python functions, perhaps. */
export function jobExample() {
  const start = `penstock jobs submit products.csv --server ${server()} \\\n  `;
  const [processor] = me.value?.processors ?? [];
  if (!me.value?.providers.length && processor) return `${start}--processor ${processor.name}`;
  const { provider, model } = asked();
  return `${start}${provider === "default" ? "" : `--provider ${provider} `}--model ${model} --prompt 'Which category is {{ title }}?'`;
}

/** A request of a session from a terminal. */
export const sessionExample = () => `penstock session send chat-1 "Hello" --server ${server()} --model ${asked().model}`;

/** A batch by an OpenAI client, which wants a key whether the server does or not. */
export const clientExample = () => `client = openai.OpenAI(base_url="${server()}/v1", api_key="${me.value?.keyless ? "none" : "sk-penstock-…"}")
file = client.files.create(file=open("requests.jsonl", "rb"), purpose="batch")
client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")`;
