/** Generates answers to requests: in rounds over the lanes, collected on the reporting rank. */
import type { DecodingTimes } from "../decode/decode.ts";
import type { SamplingOptions } from "../decode/sampling.ts";
import { Images } from "../native/images.ts";
import { exchangeTexts, type World } from "../parallel/index.ts";
import { decodingRanks, type Run } from "../train/assemble.ts";
import { dataPlaceOf } from "../train/feed/batch-source.ts";
import { deal, sequencesPerLane } from "./batch-requests.ts";
import type { ReadRequest, RequestReader } from "./requests.ts";

export interface GenerateOptions {
	/** Tokens of an answer at most; null: 256, or as many as the model has positions for. */
	readonly maxNewTokens: number | null;
	readonly sampling: SamplingOptions;
	/** Sequences of a lane that are decoded together. */
	readonly batchSize: number;
}

export interface Answer {
	readonly ids: readonly number[];
	/** Whether an end token ended it; otherwise it has as many tokens as it may. */
	readonly ended: boolean;
}

/** Tokens summed over rounds and lanes, and seconds of the slowest lane summed over rounds. */
export type Pace = DecodingTimes;

const noPace: Pace = { prefill: { tokens: 0, seconds: 0 }, decode: { tokens: 0, seconds: 0 } };

/** A lane's results of a round. */
interface Part {
	readonly answers: readonly { readonly place: number; readonly ids: readonly number[] }[];
	readonly times: Pace;
}

/** Prompts that are read as they are needed, each time anew: a file's do not all fit into memory with their images. */
export type Prompts = () => Iterable<ReadRequest>;

/**
 * The number of prompts, and the tokens that every answer may have. Throws a UserError for a prompt that leaves no room for
 * them.
 */
export function roomForAnswers(
	reader: RequestReader,
	prompts: Prompts,
	{ maxNewTokens }: Pick<GenerateOptions, "maxNewTokens">,
): { readonly count: number; readonly most: number } {
	let [count, longest] = [0, 0];
	for (const prompt of prompts()) {
		reader.requirePositions(prompt, maxNewTokens ?? 1);
		longest = Math.max(longest, prompt.ids.length);
		count++;
	}
	return { count, most: maxNewTokens ?? Math.min(256, reader.c.maxPositionEmbeddings - longest) };
}

/** Prompts in lists of `size`, the last list with the rest. */
function* rounds(prompts: Iterable<ReadRequest>, size: number): Generator<readonly ReadRequest[]> {
	let round: ReadRequest[] = [];
	for (const prompt of prompts) {
		round.push(prompt);
		if (round.length < size) continue;
		yield round;
		round = [];
	}
	if (round.length > 0) yield round;
}

/** The rank that has the answers of the first lane first: it reports. */
export function reportingRank({ topology }: Pick<Run, "topology">): number {
	return topology.language.lane(0, 0)[0]!;
}

/**
 * Answers requests in their order; `onRound` gets every round's with their requests. `onToken`: tokens of the first request as they
 * arise, on the rank that reports; in one process, where it returns false, the answer ends. Every rank of the world calls this together, and all get how fast it was.
 */
export function generate(
	run: Run,
	world: World,
	reader: RequestReader,
	prompts: Prompts,
	options: GenerateOptions,
	onRound: (answers: readonly Answer[], round: readonly ReadRequest[]) => void,
	onToken: (id: number) => boolean = () => true,
): Pace {
	const { topology, rank, state } = run;
	const images = new Images(world.device.library);
	const place = dataPlaceOf(topology, rank);
	const { count, most } = roomForAnswers(reader, prompts, options);
	const perLane = sequencesPerLane(topology, count, options.batchSize);
	const perRound = perLane * topology.language.lanes;
	const reports = rank === reportingRank(run);
	let pace = noPace;
	let first = 0;
	for (const round of rounds(prompts(), perRound)) {
		const start = first;
		first += round.length;
		const { microbatch, places } = deal(round, perLane, place, reader.task, images);
		const decoded = state.passes.decode(
			microbatch,
			{
				endIds: reader.endIds,
				most,
				sampling: options.sampling,
				onToken: (sequence, id) => {
					const isFirst = reports && start === 0 && sequence === 0;
					return !isFirst || onToken(id) || world.size > 1;
				},
			},
			decodingRanks(run),
			places.map((at) => start + at),
		);
		// Tensor-parallel ranks, and stages, have decoded the same.
		const speaks = decoded !== null && run.languageGroups!.lane.rank === 0;
		const part: Part = {
			answers: speaks ? places.map((at, index) => ({ place: at, ids: decoded.ids[index]! })) : [],
			times: speaks ? decoded.times : noPace,
		};
		const parts = exchangeTexts(state.world, JSON.stringify(part)).map((text) => JSON.parse(text) as Part);
		const answers = parts.flatMap((one) => one.answers).sort((a, b) => a.place - b.place);
		onRound(
			answers.map(({ ids }) => ({ ids, ended: ids.length < most })),
			round,
		);
		pace = together(pace, parts);
	}
	return pace;
}

function together(before: Pace, parts: readonly Part[]): Pace {
	const sum = (phase: keyof Pace) => ({
		tokens: before[phase].tokens + parts.reduce((tokens, { times }) => tokens + times[phase].tokens, 0),
		seconds: before[phase].seconds + Math.max(...parts.map(({ times }) => times[phase].seconds)),
	});
	return { prefill: sum("prefill"), decode: sum("decode") };
}

/** "prefill 12 tokens in 0.010 s (1200 tokens/s), decode 63 tokens in 0.52 s (121 tokens/s)". */
export function describePace({ prefill, decode }: Pace): string {
	const phase = (name: string, { tokens, seconds }: Pace["prefill"]) =>
		`${name} ${tokens} tokens in ${seconds.toFixed(3)} s (${Math.round(tokens / Math.max(seconds, 1e-9))} tokens/s)`;
	return `${phase("prefill", prefill)}, ${phase("decode", decode)}`;
}
