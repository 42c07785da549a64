/**
 * Layouts of N devices, and the configuration's own checks of them: the encoder on the language model's ranks or on ranks
 * of its own, the language model in one piece or in a pipeline of one or several segments a stage.
 */
import { hasEncoder, sharesRanks } from "../config/derive.ts";
import { type Block, parsePattern, symbolsOf } from "../config/hybrid-pattern.ts";
import { gridKeys } from "../config/keys/parallel.ts";
import { configurationOf, type ResolvedConfiguration } from "../config/resolve.ts";
import { type Key, keys, propertyOf, type TrainingConfiguration } from "../config/schema.ts";
import { countFlopsPerToken } from "../models/language/counts.ts";
import { UserError } from "../system/errors.ts";

/** Keys of a layout, as `mimo train` takes them. */
export type LayoutFlags = Readonly<Partial<Record<Key, number | string>>>;

/** A layout before the configuration's checks have seen it. */
export interface UncheckedLayout {
	readonly layout: LayoutFlags;
	readonly kind: LayoutKind;
	readonly encoder: { readonly tensor: number; readonly ranks: number };
	readonly language: { readonly tensor: number; readonly data: number; readonly expert: number };
}

const tensorSizes = { language: [1, 2, 4, 8], colocatedEncoder: [1, 2, 4], disjointEncoder: [1, 2] };
const expertSizes = [1, 2, 4, 8, 16, 32];
const pipelines = [1, 2, 4, 8].flatMap((stages) =>
	(stages === 1 ? [1] : [1, 2]).map((virtualStages) => ({ stages, virtualStages })),
);
/** Devices that a layout may leave idle: at most this number, or this fraction. */
const idle = { devices: 3, share: 0.05 };

/** The configuration with a layout; null: its checks refuse it. */
export function layoutCheck(resolved: ResolvedConfiguration): (layout: LayoutFlags) => TrainingConfiguration | null {
	const given = givenKeys(resolved);
	return (layout) => allowed({ ...given, ...layout });
}

/** Layouts whose numbers of ranks and lanes fit. */
export function* layouts({ configuration: c }: ResolvedConfiguration, devices: number): Generator<UncheckedLayout> {
	const lanes = c.globalBatchSize / c.microBatchSize;
	for (const { stages, virtualStages } of pipelines) {
		const pattern = cutPattern(c, stages, virtualStages);
		if (pattern === null) continue;
		for (const tensor of tensorSizes.language) {
			for (let data = 1; data <= lanes && tensor * data * stages <= devices; data++) {
				if (lanes % data !== 0) continue;
				for (const expert of expertSizes.filter((size) => (tensor * data) % size === 0)) {
					for (const { flags, modules } of encoders(c, tensor * data * stages, data, devices)) {
						const language = { "llm-tp": tensor, "llm-cp": 1, "llm-dp": data, "llm-pp": stages, "llm-ep": expert };
						const [encoderTensor, encoderData] = [Number(flags["encoder-tp"] ?? 0), Number(flags["encoder-dp"] ?? 0)];
						yield {
							layout: { ...flags, ...language, "hybrid-layer-pattern": pattern },
							kind: { modules, stages, virtualStages: stages === 1 ? 1 : segmentsOf(pattern) / stages },
							encoder: { tensor: encoderTensor, ranks: encoderTensor * encoderData },
							language: { tensor, data, expert },
						};
					}
				}
			}
		}
	}
}

/** Keys that the user has set, but for the layout. */
function givenKeys({ configuration, origins }: ResolvedConfiguration): Readonly<Partial<Record<Key, unknown>>> {
	// The layout is the search's own.
	const grids: readonly Key[] = gridKeys;
	const set = keys.filter((key) => !grids.includes(key) && !["default", "derived"].includes(origins[key].source));
	return {
		...Object.fromEntries(set.map((key) => [key, configuration[propertyOf(key)]])),
		"global-batch-size": configuration.globalBatchSize,
	};
}

/** null: the configuration's checks refuse it. */
function allowed(values: Readonly<Partial<Record<Key, unknown>>>): TrainingConfiguration | null {
	try {
		return configurationOf(values, { trains: false });
	} catch (error) {
		if (error instanceof UserError) return null;
		throw error;
	}
}

interface EncoderGrid {
	readonly flags: LayoutFlags;
	readonly modules: LayoutKind["modules"];
}

/** Encoder grids that leave few devices idle: on the language model's own ranks, and on others. */
function encoders(c: TrainingConfiguration, languageRanks: number, lanes: number, devices: number): EncoderGrid[] {
	const mayIdle = Math.max(idle.devices, Math.floor(idle.share * devices));
	const room = devices - languageRanks;
	if (!hasEncoder(c)) return room <= mayIdle ? [{ flags: {}, modules: "language alone" }] : [];
	const nests = (dp: number) => dp % lanes === 0 || lanes % dp === 0;
	const colocated = tensorSizes.colocatedEncoder
		.filter((tp) => room <= mayIdle && languageRanks % tp === 0 && nests(languageRanks / tp))
		.map((tp): EncoderGrid => {
			const flags = { "encoder-tp": tp, "encoder-dp": languageRanks / tp, "llm-offset": 0 };
			return { flags, modules: "colocated" };
		});
	const disjoint = tensorSizes.disjointEncoder.flatMap((tp) =>
		Array.from({ length: Math.floor(room / tp) }, (_, index) => index + 1)
			.filter((dp) => room - tp * dp <= mayIdle && nests(dp))
			.map((dp): EncoderGrid => ({ flags: { "encoder-tp": tp, "encoder-dp": dp }, modules: "disjoint" })),
	);
	return [...colocated, ...disjoint];
}

/** The layers' pattern for a pipeline: as the user has cut it where that fits, or in pieces of about equally many operations. */
function cutPattern(c: TrainingConfiguration, stages: number, virtualStages: number): string | null {
	const { hybridLayerPattern: pattern } = c;
	const pieces = stages * virtualStages;
	const { segments } = parsePattern(pattern);
	if (stages === 1 || segments.length === pieces) return pattern;
	const blocks = segments.flat();
	if (pieces > blocks.length) return null;
	const { layers, forward } = countFlopsPerToken(c);
	let passed = 0;
	const work = blocks.map(({ length }) => {
		passed += length;
		return layers.slice(passed - length, passed).reduce((sum, layer) => sum + layer, 0);
	});
	// The last piece also has the output layer and multi-token prediction.
	work[work.length - 1]! += forward - work.reduce((sum, one) => sum + one, 0);
	const ends = balancedCuts(work, pieces);
	const cut = ends.map((end, index) =>
		blocks
			.slice(ends[index - 1] ?? 0, end)
			.map(blockText)
			.join(""),
	);
	const slash = pattern.indexOf("/");
	return cut.join("|") + (slash < 0 ? "" : pattern.slice(slash));
}

/** As a pattern writes it: several layers in brackets. */
function blockText(block: Block): string {
	return block.length === 1 ? symbolsOf(block) : `[${symbolsOf(block)}]`;
}

/** Ends of `pieces` non-empty runs whose largest sum is least. */
export function balancedCuts(work: readonly number[], pieces: number): number[] {
	const sums = [0];
	for (const one of work) sums.push(sums.at(-1)! + one);
	/** The least of the largest sums with so many pieces up to an end, and where the last of them begins. */
	let best = sums.map((largest) => ({ largest, begins: [] as number[] }));
	for (let piece = 1; piece < pieces; piece++) {
		best = sums.map((sum, end) => {
			let least = { largest: Number.POSITIVE_INFINITY, begins: [] as number[] };
			for (let begin = piece; begin < end; begin++) {
				const largest = Math.max(best[begin]!.largest, sum - sums[begin]!);
				if (largest < least.largest) least = { largest, begins: [...best[begin]!.begins, begin] };
			}
			return least;
		});
	}
	return [...best.at(-1)!.begins, work.length];
}

/** The kind of a layout; a comparison shows the best of every kind. */
export interface LayoutKind {
	readonly modules: "colocated" | "disjoint" | "language alone";
	readonly stages: number;
	readonly virtualStages: number;
}

export function kindOf(c: TrainingConfiguration): LayoutKind {
	return {
		modules: sharesRanks(c) ? "colocated" : hasEncoder(c) ? "disjoint" : "language alone",
		stages: c.llmPp,
		virtualStages: c.llmPp === 1 ? 1 : Math.max(1, segmentsOf(c.hybridLayerPattern) / c.llmPp),
	};
}

function segmentsOf(pattern: string): number {
	return parsePattern(pattern).segments.length;
}
