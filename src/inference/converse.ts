/**
 * A conversation over standard input: a line is a turn of the user, or a command. The model answers every turn with all that was
 * said before.
 */
import { homedir } from "node:os";
import { complain, note } from "../observe/messages.ts";
import { writeOut } from "../observe/output.ts";
import { UserError } from "../system/errors.ts";
import type { ReadRequest, Request, RequestReader } from "./requests.ts";

const tag = "<image>";
const commands = "/image PATH adds a picture to the next turn, /reset forgets all turns, /exit ends";

interface Message {
	readonly role: string;
	readonly content: string;
}

/** The turns so far, and the pictures that the next turn shows. */
export class Conversation {
	#messages: readonly Message[] = [];
	/** Files of all pictures that were shown. */
	#images: readonly string[] = [];
	#waiting: readonly string[];

	constructor(
		private readonly reader: RequestReader,
		private readonly system: string | null,
		images: readonly string[],
	) {
		this.#waiting = images;
	}

	/** Adds a picture to the next turn. Throws a UserError if it cannot be shown. */
	show(path: string): void {
		this.reader.openImages(this.#request([], [path]));
		this.#waiting = [...this.#waiting, path];
	}

	reset(): void {
		[this.#messages, this.#images, this.#waiting] = [[], [], []];
	}

	/** A turn of the user, answered by `answer`. Throws a UserError if it cannot be; then the turn was not said. */
	say(line: string, answer: (request: ReadRequest) => string): void {
		const untagged = Math.max(0, this.#waiting.length - (line.split(tag).length - 1));
		const messages = [...this.#messages, { role: "user", content: `${`${tag}\n`.repeat(untagged)}${line}` }];
		const images = [...this.#images, ...this.#waiting];
		const text = answer(this.reader.read(this.#request(messages, images), this.system));
		// A tag stands for a picture, which an answer has none of.
		this.#messages = [...messages, { role: "assistant", content: text.replaceAll(tag, "") }];
		this.#images = images;
		this.#waiting = [];
	}

	#request(messages: readonly Message[], images: readonly string[]): Request {
		const { content = "" } = messages.at(-1) ?? {};
		return { name: "The conversation", record: { messages }, kind: "conversation", text: content, images };
	}
}

/** Reads lines until the input or /exit ends them. On a terminal a mistake is told and the conversation goes on. */
export async function converse(
	conversation: Conversation,
	model: string,
	answer: (request: ReadRequest) => string,
	{ json }: { readonly json: boolean },
): Promise<void> {
	const isTerminal = process.stdin.isTTY === true && !json;
	const prompt = () => writeOut(isTerminal ? "> " : "");
	if (isTerminal) note(`Model: ${model}.\n${commands}, Ctrl-C stops an answer.`);
	prompt();
	for await (const line of console) {
		try {
			if (line.trim() === "/exit") return;
			takeLine(conversation, line, answer);
		} catch (error) {
			if (!isTerminal || !(error instanceof UserError)) throw error;
			complain(error.message);
		}
		prompt();
	}
	if (isTerminal) writeOut("\n");
}

function takeLine(conversation: Conversation, line: string, answer: (request: ReadRequest) => string): void {
	const [, command, rest = ""] = /^\/(\w+)(?:\s+(.*\S))?\s*$/.exec(line.trimStart()) ?? [];
	if (line.trim() === "") return;
	if (command === undefined) conversation.say(line, answer);
	else if (command === "reset") conversation.reset();
	else if (command === "image" && rest !== "") conversation.show(pathOf(rest));
	else throw new UserError(`/${command}${rest === "" ? "" : ` ${rest}`} is no command: ${commands}.`);
}

/** The path of a typed or dropped name: without quotation marks, with the home folder for ~. */
function pathOf(typed: string): string {
	const bare = /^'(.*)'$|^"(.*)"$/.exec(typed);
	const path = bare?.[1] ?? bare?.[2] ?? typed.replaceAll("\\ ", " ");
	return path.replace(/^~(?=\/)/, homedir());
}
