/**
 * Sizes that differ between layers of a kind, as in a submodel of an elastic parent (docs/spec/elastic.md §16): a list with a
 * number for every layer of the kind in the pattern's main part replaces the size common to all. Windows of attention layers.
 */
import { countLayers, type LayerKind, parseHybridPattern } from "./hybrid-pattern.ts";
import { type CamelCase, camelCase } from "./names.ts";

const sizes = [
	["mamba", "mamba-num-heads"],
	["attention", "num-attention-heads"],
	["moe", "num-experts"],
	["moe", "moe-ffn-hidden-size"],
] as const satisfies readonly (readonly [LayerKind, string])[];

type Size = (typeof sizes)[number][1];

export interface PerLayerSize {
	readonly kind: LayerKind;
	/** Property with the size common to all layers; layers of MTP depths always have it. */
	readonly size: CamelCase<Size>;
	/** Property with the list, and its key. */
	readonly list: CamelCase<`${Size}-per-layer`>;
	readonly key: `${Size}-per-layer`;
}

export const perLayerSizes: readonly PerLayerSize[] = sizes.map(([kind, size]) => {
	const key = `${size}-per-layer` as const;
	return { kind, key, size: camelCase(size), list: camelCase(key) } as PerLayerSize;
});

/** A description of a model with these sizes; a list is absent or null if all layers of the kind are equal. */
export type SizedModel = Readonly<Record<PerLayerSize["size"], number>> &
	Readonly<Partial<Record<PerLayerSize["list"], readonly number[] | null>>> &
	Windows & { readonly hybridLayerPattern: string };

/** Megatron's windows: keys before and after a query, and the layers that have it; null: none, and all. */
interface Windows {
	readonly windowSize: readonly number[] | null;
	readonly windowAttnSkipFreq: readonly number[] | null;
}

/** Keys that a query sees, its own among them; null: all before it. */
export function keysOfWindow(size: Windows["windowSize"]): number | null {
	return size ? size[0]! + 1 : null;
}

/** Whether layer `index` of the pattern's main part has the window; a number n leaves it out of every n-th layer. */
function hasWindow({ windowSize, windowAttnSkipFreq: skip }: Windows, index: number): boolean {
	if (!windowSize || !skip) return Boolean(windowSize);
	return skip.length === 1 ? (index + 1) % skip[0]! !== 0 : skip[index] === 1;
}

/** window-attn-skip-freq as a list with 1 for every attention layer that has the window, else 0; null: all have it. */
export function windowedLayers(c: Windows & Pick<SizedModel, "hybridLayerPattern">): readonly number[] | null {
	const pattern = parseHybridPattern(c.hybridLayerPattern);
	const windowed = pattern.map((kind, index) => kind === "attention" && hasWindow(c, index));
	return pattern.every((kind, index) => kind !== "attention" || windowed[index]) ? null : windowed.map(Number);
}

/** Whether any layer has a size or a window of its own. */
export function hasOwnSizes(c: SizedModel): boolean {
	return (c.windowAttnSkipFreq ?? null) !== null || perLayerSizes.some(({ list }) => (c[list] ?? null) !== null);
}

/**
 * The description `c` with the sizes of layer `index` of the main part, counted from 0; unchanged for a layer of an MTP depth.
 */
export function modelOfLayer<Model extends SizedModel>(c: Model, index: number): Model {
	if (!hasOwnSizes(c)) return c;
	const pattern = parseHybridPattern(c.hybridLayerPattern);
	const kind = pattern[index];
	if (kind === undefined) return c;
	const place = countLayers(pattern.slice(0, index), kind);
	const own = perLayerSizes.flatMap(({ kind: sized, size, list }) => {
		const value = sized === kind ? c[list]?.[place] : undefined;
		return value === undefined ? [] : [[size, value] as const];
	});
	return { ...c, ...Object.fromEntries(own), windowSize: hasWindow(c, index) ? c.windowSize : null };
}

/** The sizes of the layers of a kind: the list, or the common size alone. */
export function sizesOf(c: SizedModel, { size, list }: PerLayerSize): readonly number[] {
	return c[list] ?? [c[size]];
}

/** The shortest form of a list of sizes: the common size if they are equal, else the largest and the list. `whole`: if empty. */
export function sharedSize(
	sizes: readonly number[],
	whole: number,
): { readonly size: number; readonly list: readonly number[] | null } {
	const [first] = sizes;
	if (first === undefined) return { size: whole, list: null };
	return sizes.every((size) => size === first)
		? { size: first, list: null }
		: { size: Math.max(...sizes), list: sizes };
}
