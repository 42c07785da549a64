/**
 * Layer patterns (docs/spec/language-model.md §1.1, §1.2, §1.4): one symbol a layer, `|` between pipeline segments, `[` and `]` around
 * layers that are one block, `/` before each multi-token prediction (MTP) depth. Symbols of Megatron that this program does not build
 * yet are refused by name; every error gives the position in the string, counted from 1.
 */
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";

/** Kinds of layers by their symbols: Mamba-2, Gated DeltaNet, attention, multi-latent attention, dense MLP, mixture of experts. */
const kindsBySymbol = { M: "mamba", G: "gdn", "*": "attention", "+": "latentAttention", "-": "mlp", E: "moe" } as const;
export type LayerKind = (typeof kindsBySymbol)[keyof typeof kindsBySymbol];

export const layerSymbols = Object.fromEntries(
	Object.entries(kindsBySymbol).map(([symbol, kind]) => [kind, symbol]),
) as Readonly<Record<LayerKind, string>>;

/** One logical layer: a symbol alone, or those of a bracket group. The unit of recomputation, pipeline cuts and overlap. */
export type Block = readonly LayerKind[];

/** Multi-token prediction: `depths` parts of the same layers, each after a `/`. */
export interface MtpPattern {
	readonly depths: number;
	readonly layers: readonly LayerKind[];
}

export interface HybridPattern {
	/** Blocks of every pipeline segment of the main part; a segment may be empty. */
	readonly segments: readonly (readonly Block[])[];
	/** null: no depth has layers. */
	readonly mtp: MtpPattern | null;
	/** Whether any layers stand in brackets. */
	readonly grouped: boolean;
}

const allowed = "allowed are M, G, *, +, - and E";

function isLayerSymbol(symbol: string): symbol is keyof typeof kindsBySymbol {
	return Object.hasOwn(kindsBySymbol, symbol);
}

/** Megatron's symbols that are not built. */
const notBuilt: Readonly<Record<string, string>> = {
	D: "DeepSeek sparse attention layers (D)",
};

/** Most symbols of a pattern; bounds the time of reading a checkpoint, whose names are compared with every layer. */
const longestPattern = 4096;

/** The error about a pattern. */
export class PatternError extends UserError {
	constructor(
		readonly pattern: string,
		/** Position in the string, from 1; 0 when the whole pattern is meant. */
		readonly position: number,
		/** The end of a sentence that starts with the pattern. */
		readonly reason: string,
	) {
		super(`Layer pattern ${JSON.stringify(pattern)}: ${reason}.`, exitCodes.usage);
	}
}

/** Parses a whole pattern. Throws a PatternError. */
export function parsePattern(pattern: string): HybridPattern {
	const symbols = [...pattern];
	if (symbols.length > longestPattern) {
		throw new PatternError(
			pattern.slice(0, 20),
			0,
			`it has ${symbols.length} symbols; at most ${longestPattern} are read`,
		);
	}
	const slash = symbols.indexOf("/");
	const main = slash < 0 ? symbols : symbols.slice(0, slash);
	if (main.every((symbol) => symbol === "|")) {
		throw new PatternError(pattern, 0, `it is empty; ${allowed}, and | between segments`);
	}
	return {
		segments: parseMain(pattern, main),
		mtp: slash < 0 ? null : parseMtp(pattern, symbols, slash + 1),
		grouped: main.includes("["),
	};
}

/** The main part's layers in order, wherever it is cut or grouped. Throws a PatternError. */
export function parseHybridPattern(pattern: string): readonly LayerKind[] {
	return parsePattern(pattern).segments.flat(2);
}

/** The pattern of the layers alone: same weights and results, however they are cut and grouped. */
export function withoutCuts(pattern: string): string {
	return pattern.replaceAll(/[|[\]]/g, "").replace(/\/+$/, "");
}

/** The pattern of the layers that have weights: of repeated MTP depths the first alone. */
export function storedPattern(pattern: string, { repeated }: { readonly repeated: boolean }): string {
	const layers = withoutCuts(pattern);
	return repeated ? layers.split("/").slice(0, 2).join("/") : layers;
}

function refuse(pattern: string, index: number, reason: string): never {
	throw new PatternError(pattern, index + 1, `position ${index + 1}: ${reason}`);
}

function parseMain(pattern: string, symbols: readonly string[]): Block[][] {
	const segments: Block[][] = [[]];
	let group: { readonly at: number; readonly layers: LayerKind[] } | null = null;
	for (const [index, symbol] of symbols.entries()) {
		if (symbol === "|") {
			if (group) refuse(pattern, index, "| cuts a group; a segment begins between groups");
			segments.push([]);
		} else if (symbol === "[") {
			if (group) refuse(pattern, index, "groups cannot be nested");
			group = { at: index, layers: [] };
		} else if (symbol === "]") {
			if (!group) refuse(pattern, index, "no group is open");
			if (group.layers.length === 0) refuse(pattern, index, "the group is empty");
			segments.at(-1)!.push(group.layers);
			group = null;
		} else {
			const layer = parseLayer(pattern, symbols, index);
			if (group?.layers.includes("moe")) refuse(pattern, index, "E must be the last of its group");
			if (group) group.layers.push(layer);
			else segments.at(-1)!.push([layer]);
		}
	}
	if (group) refuse(pattern, group.at, "the group is not closed");
	return segments;
}

/** Parses the MTP depths, which must be equal; null if they are empty, as after a trailing `/`. */
function parseMtp(pattern: string, symbols: readonly string[], first: number): MtpPattern | null {
	const parts: { readonly at: number; readonly layers: LayerKind[] }[] = [{ at: first, layers: [] }];
	for (let index = first; index < symbols.length; index++) {
		const symbol = symbols[index]!;
		if (symbol === "/") parts.push({ at: index + 1, layers: [] });
		else if (symbol === "|") refuse(pattern, index, "| cannot stand in a multi-token prediction part");
		else if (symbol === "[" || symbol === "]")
			refuse(pattern, index, "groups cannot stand in a multi-token prediction part");
		else parts.at(-1)!.layers.push(parseLayer(pattern, symbols, index));
	}
	const { layers } = parts[0]!;
	const other = parts.find((part) => symbolsOf(part.layers) !== symbolsOf(layers));
	if (other) {
		const names = [layers, other.layers].map((symbols) => (symbols.length === 0 ? "no layers" : symbolsOf(symbols)));
		refuse(
			pattern,
			other.at,
			`multi-token prediction parts must be equal; the first has ${names[0]}, this one ${names[1]}`,
		);
	}
	return layers.length === 0 ? null : { depths: parts.length, layers };
}

function parseLayer(pattern: string, symbols: readonly string[], index: number): LayerKind {
	const symbol = symbols[index]!;
	if (isLayerSymbol(symbol)) return kindsBySymbol[symbol];
	const what = Object.hasOwn(notBuilt, symbol)
		? `${notBuilt[symbol]} are not built yet`
		: `${JSON.stringify(symbol)} is not a layer symbol`;
	return refuse(pattern, index, `${what}; ${allowed}`);
}

/** The symbols of layers, as patterns have them. */
export function symbolsOf(layers: readonly LayerKind[]): string {
	return layers.map((kind) => layerSymbols[kind]).join("");
}

export function countLayers(layers: readonly LayerKind[], kind: LayerKind): number {
	return layers.filter((layer) => layer === kind).length;
}

/** Whether a pattern, of the main part or of MTP depths, has layers of any of these kinds. */
export function hasLayer(pattern: string, ...kinds: readonly LayerKind[]): boolean {
	return kinds.some((kind) => pattern.includes(layerSymbols[kind]));
}

// How a layer pattern is cut for a pipeline (docs/spec/language-model.md §1.2, §1.3, §1.4).

const layersOf = (blocks: readonly Block[]) => blocks.reduce((sum, { length }) => sum + length, 0);

/**
 * Layers of every pipeline segment, in order: those between the pattern's |, or one equal segment a stage. A single stage has
 * one segment. Meaningless for a pattern that pipelineObjection refuses.
 */
export function segmentLengths(pattern: string, stages: number): number[] {
	const segments = parsePattern(pattern).segments.map(layersOf);
	const layers = segments.reduce((sum, length) => sum + length, 0);
	if (stages === 1) return [layers];
	return segments.length > 1 ? segments : new Array<number>(stages).fill(Math.floor(layers / stages));
}

/** Why rows of so many taps of a tower (DeepStack) cannot be added in the first pipeline segment of `first` layers; null: they can. */
export function deepStackObjection(layers: readonly LayerKind[], first: number, taps: number): string | null {
	const feedForward = (end: number) => layers.slice(0, end).filter((kind) => kind === "mlp" || kind === "moe").length;
	if (feedForward(first) >= Math.min(taps, feedForward(layers.length))) return null;
	return `rows of ${counted(taps, "layer")} are added behind the first MLPs or experts, of which the first pipeline stage has ${feedForward(first)}`;
}

/** The end of a sentence that starts with "allowed is": why so many stages cannot hold the pattern; null: they can. */
export function pipelineObjection(pattern: string, stages: number): string | null {
	if (stages === 1) return null;
	const { segments } = parsePattern(pattern);
	if (segments.length > 1) {
		if (segments.length % stages === 0) return null;
		return `a divisor of the ${segments.length} segments into which | cuts hybrid-layer-pattern`;
	}
	const blocks = segments[0]!;
	const layers = layersOf(blocks);
	if (layers % stages !== 0)
		return `a divisor of its ${layers} layers where no | in hybrid-layer-pattern cuts them into segments`;
	let begin = 0;
	for (const block of blocks) {
		const cut = Math.ceil((begin + 1) / (layers / stages)) * (layers / stages);
		if (cut < begin + block.length) {
			const group = `[${symbolsOf(block)}] of layers ${begin} to ${begin + block.length - 1}`;
			return `a number of equal stages that cuts no group; ${stages} would cut ${group}: say with | where stages begin`;
		}
		begin += block.length;
	}
	return null;
}
