/** The description of a submodel as a model of its own, and the units of the parent that it keeps (docs/spec/elastic.md §16). */
import type { LanguageModelConfiguration } from "../../../checkpoint/index.ts";
import { countLayers, type LayerKind, parsePattern } from "../../../config/hybrid-pattern.ts";
import { modelOfLayer, perLayerSizes, sharedSize } from "../../../config/per-layer.ts";
import type { Submodel } from "./submodel.ts";
import { firstOfGroups, firstPlaces, type KeptUnits, type LayerUnits, wholeLayer } from "./units.ts";

/** The keys of the description that a submodel has otherwise than its parent. */
export type SubmodelKeys = Pick<LanguageModelConfiguration, "hiddenSize" | "hybridLayerPattern" | "numLayers"> &
	Partial<LanguageModelConfiguration>;

/** Sizes of the layers that stay; those of MTP depths keep the parent's. */
export function submodelKeys(parent: LanguageModelConfiguration, submodel: Submodel): SubmodelKeys {
	const { segments, mtp } = parsePattern(parent.hybridLayerPattern);
	const pattern = segments.flat(2);
	const stays = (kind: LayerKind) =>
		pattern.flatMap((layer, index) => (layer === kind ? [submodel.keptLayers[index]!] : []));
	const sizes = {
		mambaNumHeads: submodel.mambaNumHeads,
		numAttentionHeads: submodel.numAttentionHeads,
		numExperts: submodel.numMoeExperts,
		moeFfnHiddenSize: submodel.moeFfnHiddenSize,
	};
	const own = perLayerSizes.flatMap(({ kind, size, list }) => {
		const kept = sizes[size].filter((_, at) => stays(kind)[at]);
		const shared = sharedSize(kept, parent[size]);
		if (mtp?.layers.includes(kind) && (shared.list !== null || shared.size !== parent[size])) {
			return [[list, kept] as const];
		}
		return [[size, shared.size] as const, [list, shared.list] as const];
	});
	const hybridLayerPattern = patternOf(parent.hybridLayerPattern, submodel.keptLayers);
	return {
		hiddenSize: submodel.hiddenSize,
		hybridLayerPattern,
		numLayers: submodel.keptLayers.filter((kept) => kept).length,
		...Object.fromEntries(own),
	};
}

/** The pattern without the layers that are left out, its groups as they were, uncut. */
export function patternOf(pattern: string, kept: readonly boolean[]): string {
	const slash = pattern.indexOf("/");
	const main = slash < 0 ? pattern : pattern.slice(0, slash);
	let layer = 0;
	const left = [...main.replaceAll("|", "")].filter((symbol) => "[]".includes(symbol) || kept[layer++]).join("");
	return left.replaceAll("[]", "").replaceAll(/\[(.)\]/g, "$1") + (slash < 0 ? "" : pattern.slice(slash));
}

/** Of every axis the first units. */
export function unitsOfSubmodel(parent: LanguageModelConfiguration, submodel: Submodel): KeptUnits {
	const pattern = parsePattern(parent.hybridLayerPattern).segments.flat(2);
	const layers = pattern.map((kind, index): LayerUnits | null => {
		const at = countLayers(pattern.slice(0, index), kind);
		if (!submodel.keptLayers[index]) return null;
		const own = modelOfLayer(parent, index);
		switch (kind) {
			case "mamba":
				return {
					...wholeLayer,
					mambaHeads: firstOfGroups(own.mambaNumHeads, own.mambaNumGroups, submodel.mambaNumHeads[at]!),
				};
			case "attention":
				return {
					...wholeLayer,
					queryHeads: firstOfGroups(own.numAttentionHeads, own.numQueryGroups, submodel.numAttentionHeads[at]!),
				};
			case "moe": {
				const channels = prefix(own.moeFfnHiddenSize, submodel.moeFfnHiddenSize[at]!);
				return {
					...wholeLayer,
					experts: prefix(own.numExperts, submodel.numMoeExperts[at]!),
					channels: () => channels,
				};
			}
			default:
				return wholeLayer;
		}
	});
	return { hidden: prefix(parent.hiddenSize, submodel.hiddenSize), layers };
}

function prefix(all: number, kept: number): Uint32Array | null {
	return kept === all ? null : firstPlaces(kept);
}
