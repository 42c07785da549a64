/**
 * Layer patterns: one symbol a layer (language-model.md §1.1, §1.2). What Megatron knows and this program does not
 * build yet is refused by name; every error gives the position in the string, counted from 1.
 */
import { UserError } from "../native/errors.ts";
import { exitCodes } from "../native/exit-codes.ts";

/** M Mamba-2, * attention, - dense MLP, E mixture of experts. */
export type LayerSymbol = "M" | "*" | "-" | "E";

function isLayerSymbol(symbol: string): symbol is LayerSymbol {
	return symbol === "M" || symbol === "*" || symbol === "-" || symbol === "E";
}

/** Megatron's symbols that are not built. */
const notBuilt: Readonly<Record<string, string>> = {
	"/": "multi-token prediction depths (/)",
	"[": "layer groups ([ and ])",
	"]": "layer groups ([ and ])",
	G: "Gated DeltaNet layers (G)",
	D: "DeepSeek sparse attention layers (D)",
	"+": "multi-latent attention layers (+)",
};

/** A pattern that is refused. */
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

/** The layers of a pattern in order, wherever it is cut. Throws a PatternError. */
export function parseHybridPattern(pattern: string): readonly LayerSymbol[] {
	return parseSegments(pattern).flat();
}

/** The layers of every segment of a pattern, which | cuts; a segment may be empty. Throws a PatternError. */
export function parseSegments(pattern: string): readonly (readonly LayerSymbol[])[] {
	if (withoutCuts(pattern) === "") {
		throw new PatternError(pattern, 0, "it is empty; allowed are M, *, - and E, and | between segments");
	}
	let position = 0;
	return pattern.split("|").map((segment) => {
		const first = position;
		position += [...segment].length + 1;
		return parseLayers(pattern, segment, first);
	});
}

/** A pattern's layers alone. */
export function withoutCuts(pattern: string): string {
	return pattern.replaceAll("|", "");
}

function parseLayers(pattern: string, segment: string, first: number): LayerSymbol[] {
	return [...segment].map((symbol, at) => {
		const index = first + at;
		if (isLayerSymbol(symbol)) return symbol;
		const what = Object.hasOwn(notBuilt, symbol)
			? `${notBuilt[symbol]} are not built yet`
			: `${JSON.stringify(symbol)} is no layer symbol`;
		throw new PatternError(pattern, index + 1, `position ${index + 1}: ${what}; allowed are M, *, - and E`);
	});
}

/** How many layers of a kind the pattern has. */
export function countLayers(layers: readonly LayerSymbol[], kind: LayerSymbol): number {
	return layers.filter((layer) => layer === kind).length;
}
