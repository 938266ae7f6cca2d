// A job that is being put together: what the reader has chosen so far, and the spec that follows from it.

/** @typedef {{name: string, type?: string | null}} FoundColumn as the server found it */
/** @typedef {{name?: string, type?: string, dropped?: boolean}} ColumnChoice */

/**
 * @typedef {object} Draft
 * @property {File[]} files
 * @property {Record<string, ColumnChoice>} columns by the name that it was found with
 * @property {string} sheet
 * @property {"prompt" | "processor" | "definition"} how
 * @property {string} provider
 * @property {string} model
 * @property {string} system
 * @property {string} prompt
 * @property {string} schema
 * @property {string} processor
 * @property {string} definition
 * @property {string} jobType
 * @property {string} maxConcurrency
 * @property {string} maxAttempts
 * @property {string} priority
 */

/** Models of a provider that are names, not patterns. @param {{models: string[]} | undefined} provider */
export const namedModels = (provider) => (provider?.models ?? []).filter((model) => !/[*?[]/.test(model));

/** @param {import("../store.js").Me} me @returns {Draft} */
export function emptyDraft(me) {
  const provider = me.providers[0];
  return {
    files: [],
    columns: {},
    sheet: "",
    how: provider ? "prompt" : me.processors.length ? "processor" : "prompt",
    provider: provider?.name ?? "",
    model: namedModels(provider)[0] ?? "",
    system: "",
    prompt: "",
    schema: "",
    processor: me.processors[0]?.name ?? "",
    definition: "",
    jobType: "",
    maxConcurrency: "",
    maxAttempts: "",
    priority: "",
  };
}

const IMAGE = /\.(png|jpe?g|gif|webp)$/i;
const TEXT = /\.(csv|tsv|txt|jsonl|ndjson|json)$/i;

/** What kind of files these are. @param {File[]} files @returns {"none" | "images" | "text" | "whole"} */
export function kindOf(files) {
  if (!files.length) return "none";
  if (files.every((file) => IMAGE.test(file.name) || file.type.startsWith("image/"))) return "images";
  return TEXT.test(files[0].name) ? "text" : "whole";
}

/**
 * The columns part of a spec: only what differs from what was found.
 * @param {Draft} draft
 * @param {FoundColumn[]} found as found without any choice
 */
export function columnSpec(draft, found) {
  /** @type {Record<string, any>} */
  const spec = {};
  /** @type {Record<string, string>} */
  const rename = {};
  /** @type {Record<string, string>} */
  const types = {};
  const keep = [];
  for (const column of found) {
    const choice = draft.columns[column.name] ?? {};
    const name = choice.name?.trim() || column.name;
    if (name !== column.name) rename[column.name] = name;
    if (choice.dropped) continue;
    keep.push(name);
    if (choice.type) types[name] = choice.type;
  }
  if (Object.keys(rename).length) spec.rename = rename;
  if (Object.keys(types).length) spec.types = types;
  if (keep.length < found.length) spec.keep = keep;
  if (draft.sheet) spec.sheet = draft.sheet;
  return spec;
}

/**
 * What is done with each row. Throws if a part of it is no JSON.
 * @param {Draft} draft
 * @returns {string | Record<string, any> | null} null if it is not said yet
 */
export function processorSpec(draft) {
  if (draft.how === "processor") return draft.processor || null;
  if (draft.how === "definition") return draft.definition.trim() ? parseJson(draft.definition, "The definition") : null;
  if (!draft.prompt.trim() || !draft.model.trim()) return null;
  /** @type {Record<string, any>} */
  const chat = { type: "chat", provider: draft.provider, model: draft.model.trim(), prompt: draft.prompt };
  if (draft.system.trim()) chat.system = draft.system;
  if (draft.schema.trim()) chat.schema = parseJson(draft.schema, "The schema");
  return chat;
}

/**
 * The spec of `POST /api/jobs`.
 * @param {Draft} draft
 * @param {FoundColumn[]} found
 * @param {number} [limit] only so many rows
 */
export function jobSpec(draft, found, limit) {
  /** @type {Record<string, any>} */
  const spec = { columns: columnSpec(draft, found) };
  const processor = processorSpec(draft);
  if (processor !== null) spec.processor = processor;
  if (draft.jobType.trim()) spec.jobType = draft.jobType.trim();
  for (const name of /** @type {const} */ (["maxConcurrency", "maxAttempts", "priority"])) {
    if (draft[name].trim()) spec[name] = Number(draft[name]);
  }
  if (limit) spec.limit = limit;
  return spec;
}

/** @param {string} text @param {string} what */
function parseJson(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is no JSON: ${error instanceof Error ? error.message : error}`);
  }
}

/** How a template names a column. @param {string} name */
export const reference = (name) => (/^[A-Za-z_][A-Za-z0-9_]*$/.test(name) ? `{{ ${name} }}` : `{{ row[${JSON.stringify(name)}] }}`);
