/** Faults that keep a readable conversation from teaching a model anything. */
import type { Conversation } from "./conversation.ts";

/** Why training would learn nothing, or the wrong thing, from a conversation; null: the conversation is sound. */
export function faultOf({ turns }: Conversation): string | null {
	const textOf = (fragments: readonly unknown[] | null) =>
		(fragments ?? [])
			.filter((fragment) => typeof fragment === "string")
			.join("")
			.trim();
	const answers = turns.filter(({ role }) => role === "assistant");
	const isDocument = turns.every(({ role }) => role === null);
	if (answers.length === 0 && !isDocument) return "it has no turn of an assistant, so nothing is learned from it";
	const empty = answers.findIndex(({ fragments }) => fragments !== null && textOf(fragments) === "");
	if (empty >= 0) return answers.length === 1 ? "its answer is empty" : `its answer ${empty + 1} is empty`;
	if (isDocument && turns.every(({ fragments }) => textOf(fragments) === "")) return "it has no text";
	return null;
}
