// Keys. Pages say which they have while they are shown; `?` lists them.
import { signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";

/** @typedef {{key: string, label: string, run: (event: KeyboardEvent) => void}} Binding */

/** Bindings that are in force, those of the page last. */
export const bindings = signal(/** @type {Binding[]} */ ([]));

/** @param {EventTarget | null} target */
function isTyping(target) {
  return (
    target instanceof HTMLElement &&
    (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName)) &&
    !(target instanceof HTMLInputElement && /^(checkbox|radio|button)$/.test(target.type))
  );
}

/** Whether Enter and Space do something to what has the focus. @param {EventTarget | null} target */
const isPressed = (target) => target instanceof Element && target.closest("a, button, summary, input, select, textarea, [role=button]") !== null;

addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (isTyping(event.target)) {
    if (event.key === "Escape") /** @type {HTMLElement} */ (event.target).blur();
    return;
  }
  if (document.querySelector("dialog:modal")) return;
  if ((event.key === "Enter" || event.key === " ") && isPressed(event.target)) return;
  // With Shift a letter is another key, but for a binding the same that was pressed with Shift.
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const found = bindings.value.findLast((binding) => binding.key === key);
  if (!found) return;
  event.preventDefault();
  found.run(event);
});

/**
 * Have some keys while a component is shown.
 * @param {Binding[]} wanted their `run` may change between renderings; keys and labels may not
 */
export function useKeys(wanted) {
  const latest = useRef(wanted);
  latest.current = wanted;
  // Before it can be seen: a key pressed at once is not lost.
  useLayoutEffect(() => {
    const bound = wanted.map(({ key, label }, at) => ({
      key,
      label,
      run: (/** @type {KeyboardEvent} */ event) => latest.current[at]?.run(event),
    }));
    bindings.value = [...bindings.peek(), ...bound];
    return () => {
      bindings.value = bindings.peek().filter((binding) => !bound.includes(binding));
    };
  }, []);
}
