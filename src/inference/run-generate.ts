/** `mimo generate` on a rank: opens the model, answers, writes. */
import { appendFileSync, existsSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { SamplingOptions } from "../decode/sampling.ts";
import { Images } from "../native/images.ts";
import { Interrupts } from "../native/interrupts.ts";
import type { Library } from "../native/library.ts";
import { complain, firstWarning, note, warn } from "../observe/messages.ts";
import { writeOut } from "../observe/output.ts";
import type { World } from "../parallel/index.ts";
import { UserError } from "../system/errors.ts";
import { fileError } from "../system/system-errors.ts";
import type { Run } from "../train/assemble.ts";
import { openModel } from "./checkpoint-model.ts";
import {
	type Answer,
	describePace,
	type GenerateOptions,
	generate,
	type Pace,
	type Prompts,
	reportingRank,
	roomForAnswers,
} from "./generate.ts";
import { type ReadRequest, type Request, RequestReader, readJsonl, requestOf } from "./requests.ts";

interface Options extends Omit<GenerateOptions, "sampling"> {
	/** Whether a Hugging Face folder without a tokenizer holds a model of bytes. */
	readonly bytes: boolean;
	/** Whether every answer is a line of JSON with its prompt. */
	readonly json: boolean;
	readonly sampling: Omit<SamplingOptions, "seed">;
}

/** One prompt, the records of a file, or a conversation over standard input. */
export type GenerateJob =
	| {
			readonly kind: "prompt";
			readonly prompt: string;
			readonly images: readonly string[];
			readonly chat: boolean;
			readonly system: string | null;
			readonly options: Options;
	  }
	| {
			readonly kind: "records";
			readonly input: string;
			readonly output: string | null;
			readonly chat: boolean;
			readonly system: string | null;
			readonly options: Options;
	  }
	| {
			readonly kind: "conversation";
			readonly images: readonly string[];
			readonly system: string | null;
			/** Whether the pace of every answer is printed. */
			readonly showsPace: boolean;
			readonly options: Options;
	  };

/** The requests of a job; a conversation's are not known yet. */
function requestsOf(job: GenerateJob): Iterable<Request> {
	switch (job.kind) {
		case "prompt":
			return [
				{
					name: "The prompt",
					record: {},
					kind: job.chat ? "conversation" : "text",
					text: job.prompt,
					images: job.images,
				},
			];
		case "records":
			return readJsonl(job.input).map((line) => requestOf(line, job.input, job.chat));
		case "conversation":
			return [];
	}
}

function promptsOf(job: GenerateJob, reader: RequestReader): Prompts {
	return () => Iterator.from(requestsOf(job)).map((request) => reader.read(request, job.system));
}

/** Throws a UserError for what can be known to be wrong before any rank starts. */
export function checkJob(c: TrainingConfiguration, job: GenerateJob, library: Library): void {
	if (job.kind === "records" && job.output !== null && existsSync(job.output)) {
		throw new UserError(`--output ${job.output} exists already: name a new file.`);
	}
	const reader = new RequestReader(c, new Images(library), job.options.bytes, firstWarning());
	roomForAnswers(reader, promptsOf(job, reader), job.options);
	const inTurns = job.kind === "conversation" || job.chat;
	if (inTurns && c.loadHf !== null && c.conversationTemplate === "plain") {
		warn(`${c.loadHf} has no chat template: turns are written as lines of text; --chat-template names one.`);
	}
}

/** Every rank of the world calls this together. */
export async function runGenerate(c: TrainingConfiguration, job: GenerateJob, world: World): Promise<void> {
	using run = await openModel(c, world, warn);
	const reader = new RequestReader(c, new Images(world.device.library), job.options.bytes);
	const options = { ...job.options, sampling: { ...job.options.sampling, seed: c.seed } };
	const reports = run.rank === reportingRank(run);
	let pace: Pace;
	switch (job.kind) {
		case "prompt":
			({ pace } = answerPrompt(run, world, reader, promptsOf(job, reader), options));
			break;
		case "records":
			pace = answerRecords(run, world, reader, job, options);
			break;
		case "conversation":
			await converse(
				new Conversation(reader, job.system, job.images),
				c.load ?? c.loadHf!,
				(request) => {
					// Ctrl-C stops this answer; at the prompt it ends the program.
					using interrupts = new Interrupts(world.device.library, "");
					const { pace, text } = answerPrompt(run, world, reader, () => [request], options, interrupts);
					if (job.showsPace) process.stderr.write(`${describePace(pace)}\n`);
					return text;
				},
				options,
			);
			return;
	}
	if (reports) process.stderr.write(`${describePace(pace)}\n`);
}

/** An answer as a line of JSON; with `json`, its prompt and number of tokens too. */
function answerLine(
	{ ids, ended }: Answer,
	prompt: ReadRequest,
	reader: RequestReader,
	{ json }: Pick<Options, "json">,
) {
	const { record, text } = prompt.request;
	const line = {
		...("id" in record && { id: record.id }),
		...(json && { prompt: text === "" ? (record.messages ?? record.conversations ?? text) : text }),
		text: reader.decode(ids),
		...(json && { prompt_tokens: prompt.ids.length }),
		tokens: ids.length,
		end: ended ? "end token" : "length",
	};
	return `${JSON.stringify(line)}\n`;
}

/** The answer to standard output: text as it arises, or a line of JSON. */
function answerPrompt(
	run: Run,
	world: World,
	reader: RequestReader,
	prompts: Prompts,
	options: GenerateOptions & Pick<Options, "json">,
	interrupts: Interrupts | null = null,
): { readonly pace: Pace; readonly text: string } {
	const { json } = options;
	const reports = run.rank === reportingRank(run);
	const stream = new TextStream((ids) => reader.decode(ids), writeOut);
	let text = "";
	const pace = generate(
		run,
		world,
		reader,
		prompts,
		options,
		([answer], [prompt]) => {
			text = reader.decode(answer!.ids);
			if (json && reports) writeOut(answerLine(answer!, prompt!, reader, options));
		},
		(id) => {
			if (!json) stream.add(id);
			return interrupts?.asked !== true;
		},
	);
	if (reports && !json) {
		stream.end();
		writeOut("\n");
	}
	return { pace, text };
}

/** A line of JSON for every record. */
function answerRecords(
	run: Run,
	world: World,
	reader: RequestReader,
	job: GenerateJob & { readonly kind: "records" },
	options: GenerateOptions,
): Pace {
	const { output } = job;
	const reports = run.rank === reportingRank(run);
	if (reports && output !== null) {
		try {
			writeFileSync(output, "", { flag: "wx" });
		} catch (error) {
			throw fileError("write", output, error);
		}
	}
	return generate(run, world, reader, promptsOf(job, reader), options, (answers, round) => {
		const lines = answers.map((answer, index) => answerLine(answer, round[index]!, reader, job.options));
		if (!reports) return;
		if (output === null) writeOut(lines.join(""));
		else appendFileSync(output, lines.join(""));
	});
}

/** The replacement character, which decoders write for bytes that are no character yet. */
const incomplete = "\ufffd";

export class TextStream {
	readonly #ids: number[] = [];
	/** Tokens from here on are decoded: some before the new ones, because spaces depend on what is before. */
	#from = 0;
	/** Tokens before this one are written. */
	#written = 0;

	constructor(
		private readonly decode: (ids: readonly number[]) => string,
		private readonly write: (text: string) => void,
	) {}

	add(id: number): void {
		this.#ids.push(id);
		this.#flush(false);
	}

	/** Writes what is left, complete or not. */
	end(): void {
		this.#flush(true);
	}

	#flush(all: boolean): void {
		const before = this.decode(this.#ids.slice(this.#from, this.#written));
		const text = this.decode(this.#ids.slice(this.#from));
		if (text.length <= before.length || (!all && text.endsWith(incomplete))) return;
		this.write(text.slice(before.length));
		this.#from = this.#written;
		this.#written = this.#ids.length;
	}
}

// A conversation over standard input: a line is a turn of the user, or a command. The model answers every turn with all that was
// said before.

const tag = "<image>";
const commands = "/image PATH adds a picture to the next turn, /reset forgets all turns, /exit ends";

interface Message {
	readonly role: string;
	readonly content: string;
}

/** The turns so far, and the pictures that the next turn shows. */
class Conversation {
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
async function converse(
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
