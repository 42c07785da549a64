/**
 * Flattens the tree of a metadataset into the list of its leaf datasets, with their weights or repetitions
 * (docs/spec/energon.md §1.7).
 */
import { UserError } from "../../../system/errors.ts";
import { joinSubflavors, type Subflavors } from "../sample.ts";
import type { Subset } from "../sharder.ts";
import type { BlendMode } from "../task-encoder.ts";
import type { AuxReference } from "./file-store.ts";
import type { Join, Metadataset, Node } from "./metadataset.ts";

/** Most leaf datasets and blends of a metadataset. */
const MOST_DATASETS = 100_000;

/** A leaf dataset of the tree. */
export interface Leaf {
	readonly source:
		| {
				readonly kind: "dataset";
				readonly path: string;
				readonly datasetConfig: string | null;
				readonly splitConfig: string | null;
		  }
		| { readonly kind: "join"; readonly join: Join };
	readonly splitPart: string;
	/** Subflavors of the metadatasets, where outer ones take precedence; the dataset's own have the least precedence. */
	readonly subflavors: Subflavors;
	/** null = no shuffling. */
	readonly shuffleOverEpochs: number | null;
	readonly subset: Subset | null;
	readonly aux: ReadonlyMap<string, AuxReference>;
	readonly weight: number | null;
	readonly repetitions: number | null;
}

/** Combines nested subsets: absolute bounds are allowed only at the leaf; fractions apply to fractions. */
function mergeSubset(own: Subset | null, outer: Subset | null, where: string): Subset | null {
	if (outer?.absoluteRange != null) {
		throw new UserError(
			`${where} has an outer subset in sample numbers; outside of a dataset only percentages are allowed.`,
		);
	}
	if (own === null || outer === null) return own ?? outer;
	const size = own.range[1] - own.range[0];
	return {
		absoluteRange: own.absoluteRange,
		range: [own.range[0] + outer.range[0] * size, own.range[0] + outer.range[1] * size],
	};
}

/** Settings that a node passes on to its subtree. */
interface Inherited {
	readonly splitPart: string;
	readonly subflavors: Subflavors;
	readonly multiplier: number | null;
	readonly subset: Subset | null;
}

/** Leaves of a split part, in order, and how they are combined. */
export function flatten(
	metadataset: Metadataset,
	inherited: Inherited,
	seen: { nodes: number } = { nodes: 0 },
): { readonly mode: BlendMode; readonly leaves: readonly Leaf[] } {
	const node = metadataset.splits.get(inherited.splitPart);
	if (node === undefined) {
		throw new UserError(
			`${metadataset.path} has no split ${inherited.splitPart}; it has ${[...metadataset.splits.keys()].join(", ")}.`,
		);
	}
	return flattenNode(node, inherited, metadataset.path, seen);
}

/** `seen`: number of nodes so far, which is bounded because a few files that name each other twice expand exponentially. */
function flattenNode(
	node: Node,
	inherited: Inherited,
	where: string,
	seen: { nodes: number },
): { mode: BlendMode; leaves: Leaf[] } {
	if (++seen.nodes > MOST_DATASETS) {
		throw new UserError(`${where} is part of a metadataset that stands for more than ${MOST_DATASETS} data sets.`);
	}
	switch (node.kind) {
		case "reference": {
			const { reference, nested } = node;
			const below: Inherited = {
				splitPart: reference.splitPart ?? inherited.splitPart,
				subflavors: joinSubflavors(reference.subflavors, inherited.subflavors),
				multiplier: multiply(inherited.multiplier, reference.shuffleOverEpochsMultiplier),
				subset: mergeSubset(reference.subset, inherited.subset, reference.path),
			};
			if (nested !== null) {
				const { mode, leaves } = flatten(nested, below, seen);
				return { mode, leaves: [...leaves] };
			}
			const { path, datasetConfig, splitConfig, aux } = reference;
			const source = { kind: "dataset" as const, path, datasetConfig, splitConfig };
			return { mode: "none", leaves: [leafOf(source, below, aux)] };
		}
		case "join": {
			const { join } = node;
			const below: Inherited = {
				// Energon ignores a join's own multiplier.
				multiplier: inherited.multiplier,
				splitPart: join.splitPart ?? inherited.splitPart,
				subflavors: joinSubflavors(join.subflavors, inherited.subflavors),
				subset: mergeSubset(join.subset, inherited.subset, where),
			};
			return { mode: "none", leaves: [leafOf({ kind: "join", join }, below, new Map())] };
		}
		case "blend": {
			const total = exactSum(node.items.map(({ weight }) => weight));
			const subset = mergeSubset(node.subset, inherited.subset, where);
			const leaves = node.items.flatMap(({ node: inner, weight }) => {
				const below = flattenNode(inner, { ...inherited, subset }, where, seen);
				if (below.mode === "repetitions") throw mixed(where);
				return below.leaves.map((leaf) => ({ ...leaf, weight: ((leaf.weight ?? 1) * weight) / total }));
			});
			return { mode: "weight", leaves };
		}
		case "blend_epochized": {
			const subset = mergeSubset(node.subset, inherited.subset, where);
			const leaves = node.items.flatMap(({ node: inner, repetitions }) => {
				const below = flattenNode(inner, { ...inherited, subset }, where, seen);
				if (below.mode === "weight") throw mixed(where);
				return below.leaves.map((leaf) => ({ ...leaf, repetitions: repetitions * (leaf.repetitions ?? 1) }));
			});
			return { mode: "repetitions", leaves };
		}
	}
}

function leafOf(source: Leaf["source"], inherited: Inherited, aux: ReadonlyMap<string, AuxReference>): Leaf {
	const { splitPart, subflavors, multiplier, subset } = inherited;
	return { source, splitPart, subflavors, shuffleOverEpochs: multiplier, subset, aux, weight: null, repetitions: null };
}

function mixed(where: string): UserError {
	return new UserError(
		`${where} mixes blend and blend_epochized; a blend and everything below it must be of one kind.`,
	);
}

/** The product, where null (no shuffling) takes precedence over -1 (with replacement), and -1 over numbers. */
function multiply(outer: number | null, inner: number | null): number | null {
	if (outer === null || inner === null) return null;
	return outer === -1 || inner === -1 ? -1 : outer * inner;
}

/** Compensated (Neumaier) sum, as Python's sum of floats. */
function exactSum(values: readonly number[]): number {
	let sum = 0;
	let lost = 0;
	for (const value of values) {
		const next = sum + value;
		lost += Math.abs(sum) >= Math.abs(value) ? sum - next + value : value - next + sum;
		sum = next;
	}
	return sum + lost;
}
