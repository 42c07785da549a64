/** Answers questions with a model: by generated text, or by the choice of lowest loss. */
import { ignored } from "../data/vision-language/encoding.ts";
import { requireAllTokens } from "../decode/decode.ts";
import { greedy } from "../decode/sampling.ts";
import { Images } from "../native/images.ts";
import { exchangeTexts, type World } from "../parallel/index.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import type { Run } from "../train/assemble.ts";
import { evaluate } from "../train/evaluate.ts";
import { dataPlaceOf } from "../train/feed/batch-source.ts";
import { deal, type LabelledPrompt, sequencesPerLane } from "./batch-requests.ts";
import { generate } from "./generate.ts";
import { type Metric, scoreOf } from "./metrics.ts";
import { type ReadRequest, type Request, type RequestReader, readJsonl, requestOf } from "./requests.ts";

export interface Answered {
	readonly kind: Question["kind"];
	/** Text that the model wrote, or the choice it took. */
	readonly text: string;
	readonly right: boolean;
	/** Scores of a text by the metrics that were asked for, from 0 to 1. */
	readonly scores?: Readonly<Partial<Record<Metric, number>>>;
	/** Mean token loss of every choice. */
	readonly losses?: readonly number[];
}

export interface AnsweringOptions {
	readonly batchSize: number;
	readonly metrics: readonly Metric[];
	/** Tokens of a text at most; null: as many as the longest right one has, and an end. */
	readonly maxNewTokens: number | null;
}

/** Answers in the order of the questions. Every rank of the world calls this together. */
export function answer(
	run: Run,
	world: World,
	reader: RequestReader,
	questions: readonly Question[],
	options: AnsweringOptions,
): Answered[] {
	const { batchSize } = options;
	const read = questions.map(({ request }) => reader.read(request));
	const answers: Answered[] = [];
	const exact = questions.flatMap((question, index) => (question.kind === "exact" ? [index] : []));
	if (exact.length > 0) {
		const texts = write(run, world, reader, questions, exact, read, options);
		for (const [at, index] of exact.entries()) {
			const { answers: allowed } = questions[index] as Question & { kind: "exact" };
			const text = texts[at]!;
			const scores = Object.fromEntries(options.metrics.map((metric) => [metric, scoreOf(metric, text, allowed)]));
			answers[index] = { kind: "exact", text, right: scoreOf("exact_match", text, allowed) === 1, scores };
		}
	}
	const sequences = questions.flatMap((question, index) =>
		question.kind === "exact"
			? []
			: question.choices.map((choice) => ({ index, prompt: withChoice(reader, read[index]!, choice) })),
	);
	const losses = lossesOf(
		run,
		world,
		reader,
		sequences.map(({ prompt }) => prompt),
		batchSize,
	);
	for (const [index, question] of questions.entries()) {
		if (question.kind === "exact") continue;
		const own = losses.filter((_, at) => sequences[at]!.index === index);
		const taken = own.indexOf(Math.min(...own));
		answers[index] = { kind: "choice", text: question.choices[taken]!, right: taken === question.right, losses: own };
	}
	return answers;
}

/** The texts that the model writes after the questions at `exact`. */
function write(
	run: Run,
	world: World,
	reader: RequestReader,
	questions: readonly Question[],
	exact: readonly number[],
	read: readonly ReadRequest[],
	{ batchSize, maxNewTokens }: AnsweringOptions,
): string[] {
	const lengths = exact.flatMap((index) =>
		(questions[index] as Question & { kind: "exact" }).answers.map(
			(text) => reader.tokenizer.encodeParts([{ text, markup: false }]).length,
		),
	);
	const most = maxNewTokens ?? 1 + lengths.reduce((longest, one) => Math.max(longest, one), 0);
	const texts: string[] = [];
	generate(
		run,
		world,
		reader,
		() => exact.map((index) => read[index]!),
		{ maxNewTokens: most, sampling: greedy, batchSize },
		(answers) => texts.push(...answers.map(({ ids }) => reader.decode(ids))),
	);
	return texts;
}

/** A prompt with a choice after it, whose tokens count. */
function withChoice(reader: RequestReader, prompt: ReadRequest, choice: string): LabelledPrompt {
	const tokens = reader.tokenizer.encodeParts([{ text: choice, markup: false }]);
	reader.requirePositions(prompt, tokens.length);
	const ids = Int32Array.from([...prompt.ids, ...tokens]);
	const labels = new Int32Array(ids.length).fill(ignored);
	labels.set(tokens, prompt.ids.length - 1);
	return { ids, labels, images: prompt.images };
}

/** Mean loss of the tokens that count of every sequence. */
function lossesOf(
	run: Run,
	world: World,
	reader: RequestReader,
	prompts: readonly LabelledPrompt[],
	batchSize: number,
): number[] {
	const { topology, rank, state } = run;
	if (run.language) requireAllTokens(run.language);
	const images = new Images(world.device.library);
	const place = dataPlaceOf(topology, rank);
	const perLane = sequencesPerLane(topology, prompts.length, batchSize);
	const perRound = perLane * topology.language.lanes;
	const found: number[] = [];
	for (let first = 0; first < prompts.length; first += perRound) {
		const round = prompts.slice(first, first + perRound);
		const parts = run.language?.parallel.tp.size ?? 1;
		const { microbatch, places } = deal(round, perLane, place, reader.task, images, parts);
		const { labels, lengths } = microbatch.text;
		const own: { readonly place: number; readonly loss: number }[] = [];
		evaluate(state, [microbatch], (name, value) => {
			if (name !== "per_token_loss" || state.lossOwner?.counts !== true) return;
			const losses = value.toFloat32();
			let begin = 0;
			for (const [index, at] of places.entries()) {
				const end = begin + lengths[index]!;
				let [sum, count] = [0, 0];
				for (let token = begin; token < end; token++) {
					if (labels[token] === ignored) continue;
					sum += losses[token]!;
					count++;
				}
				own.push({ place: at, loss: sum / Math.max(1, count) });
				begin = end;
			}
		});
		const everyone = exchangeTexts(state.world, JSON.stringify(own)).flatMap((text) => JSON.parse(text) as typeof own);
		found.push(...everyone.sort((a, b) => a.place - b.place).map(({ loss }) => loss));
	}
	return found;
}

// Questions with known answers, a record a line of JSONL: `prompt` or `messages`, with images as for requests, and
// `answer` (a text, or several as `answers`), or `choices` that include `answer`: its text, its number from 0, or its
// letter.

export type Question = { readonly request: Request } & (
	| { readonly kind: "exact"; readonly answers: readonly string[] }
	| { readonly kind: "choice"; readonly choices: readonly string[]; readonly right: number }
);

/** Reads a file of questions. Throws a UserError that names a line that is not a question. */
export function readQuestions(path: string, chat: boolean): Question[] {
	return Array.from(readJsonl(path), (line) => {
		const request = requestOf(line, path, chat);
		const { answer, answers, choices } = line.record;
		if (choices === undefined) {
			const allowed = [answers ?? answer ?? []].flat().map(String);
			if (allowed.length === 0) throw new UserError(`${line.name} has no answer.`);
			return { request, kind: "exact", answers: allowed };
		}
		if (!Array.isArray(choices) || choices.length < 2) {
			throw new UserError(`${line.name}: choices are a list of at least two texts.`);
		}
		const texts = choices.map(String);
		const right = rightOne(texts, answer);
		if (right === null) {
			throw new UserError(
				`${line.name}: answer is ${JSON.stringify(answer)}; it is the text, the number from 0 or the letter of one of ${counted(choices.length, "choice")}.`,
			);
		}
		return { request, kind: "choice", choices: texts, right };
	});
}

function rightOne(choices: readonly string[], answer: unknown): number | null {
	const byText = choices.indexOf(String(answer));
	const place =
		typeof answer === "number"
			? answer
			: byText >= 0
				? byText
				: /^[A-Z]$/.test(String(answer))
					? String(answer).charCodeAt(0) - 65
					: -1;
	return Number.isInteger(place) && place >= 0 && place < choices.length ? place : null;
}
