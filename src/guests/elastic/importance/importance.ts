/**
 * Importance scores of a model's units, measured on data, and the order that follows (docs/spec/elastic.md §23): the file that
 * `mimo elastic rank` writes and `mimo convert-ckpt --permute` reads.
 */
import * as v from "valibot";
import {
	type LanguageModelConfiguration,
	SelectedStore,
	type Selection,
	type SourceCheckpoint,
	selectTensors,
} from "../../../checkpoint/index.ts";
import { parseHybridPattern, withoutCuts } from "../../../config/hybrid-pattern.ts";
import { modelOfLayer } from "../../../config/per-layer.ts";
import { counted } from "../../../system/counted.ts";
import { UserError } from "../../../system/errors.ts";
import { indexLimits, readJsonText } from "../../../system/json.ts";
import { parentOf } from "../submodel/extract.ts";
import { type KeptUnits, type LayerUnits, selectionsOf, wholeLayer } from "../submodel/units.ts";

const scores = v.array(v.pipe(v.number(), v.finite(), v.minValue(0)));

const layerSchema = v.object({
	/** Change of the model's output without the layer; null: not measured. */
	layer: v.nullable(v.pipe(v.number(), v.finite(), v.minValue(0))),
	/** Mamba and attention layers. */
	heads: v.optional(scores),
	/** MoE layers: of every expert, and of every channel of each. */
	experts: v.optional(scores),
	channels: v.optional(v.array(scores)),
});

const importanceSchema = v.object({
	format: v.literal("mimo-elastic-importance"),
	version: v.literal(1),
	/** Data that it was measured on. */
	data: v.array(v.string()),
	tokens: v.pipe(v.number(), v.integer(), v.minValue(1)),
	pattern: v.string(),
	/** Of every embedding channel. */
	embedding: scores,
	/** Of every layer of the main part. */
	layers: v.array(layerSchema),
});
export type Importance = v.InferOutput<typeof importanceSchema>;
export type LayerImportance = Importance["layers"][number];

/** Reads a file of `mimo elastic rank`. Throws a UserError that names it. */
export function readImportance(path: string): Importance {
	const text = readJsonText(path, indexLimits, { called: `the ranking ${path}` });
	let json: unknown;
	try {
		json = JSON.parse(text);
	} catch {
		throw new UserError(`${path} is no JSON, and no ranking of \`mimo elastic rank\`.`);
	}
	const { success, output, issues } = v.safeParse(importanceSchema, json);
	if (success) return output;
	throw new UserError(
		`${path} is no ranking of \`mimo elastic rank\` (${v.getDotPath(issues[0]) ?? "its form"}: ${issues[0].message}).`,
	);
}

/** Scores to five digits, a layer a line. */
export function formatImportance(importance: Importance): string {
	const round = (_: string, value: unknown) => (typeof value === "number" ? Number(value.toPrecision(5)) : value);
	const { layers, tokens, ...rest } = importance;
	const head = Object.entries({ ...rest, tokens }).map(
		([key, value]) => `\t${JSON.stringify(key)}: ${JSON.stringify(value, key === "tokens" ? undefined : round)}`,
	);
	const lines = layers.map((layer) => `\t\t${JSON.stringify(layer, round)}`);
	return `{\n${head.join(",\n")},\n\t"layers": [\n${lines.join(",\n")}\n\t]\n}\n`;
}

/**
 * All units in falling order of their scores, equal ones as they were: heads within their groups, experts within theirs. `path`: of the
 * ranking. Throws a UserError where it is of a model of other sizes.
 */
export function unitsOfImportance(c: LanguageModelConfiguration, importance: Importance, path: string): KeptUnits {
	const bad = (what: string): never => {
		throw new UserError(`${path} ranks another model: ${what}.`);
	};
	const pattern = parseHybridPattern(c.hybridLayerPattern);
	const own = withoutCuts(c.hybridLayerPattern);
	if (importance.pattern !== own) bad(`its layers are ${importance.pattern}, the checkpoint's ${own}`);
	if (importance.layers.length !== pattern.length)
		bad(`it has ${counted(importance.layers.length, "layer")}, the checkpoint ${pattern.length}`);
	const order = (what: string, values: readonly number[] | undefined, count: number, groups = 1): Uint32Array => {
		if (values?.length !== count)
			return bad(`it has ${values?.length ?? 0} scores of ${what}, the checkpoint ${count}`);
		const size = count / groups;
		const all = Array.from({ length: count }, (_, unit) => unit);
		const group = (unit: number) => Math.floor(unit / size);
		return Uint32Array.from(all.sort((a, b) => group(a) - group(b) || values[b]! - values[a]! || a - b));
	};
	const layers = pattern.map((kind, index): LayerUnits => {
		const { heads, experts, channels } = importance.layers[index]!;
		const layer = modelOfLayer(c, index);
		switch (kind) {
			case "mamba":
				return {
					...wholeLayer,
					mambaHeads: order(`heads in layer ${index}`, heads, layer.mambaNumHeads, layer.mambaNumGroups),
				};
			case "attention":
				return {
					...wholeLayer,
					queryHeads: order(`heads in layer ${index}`, heads, layer.numAttentionHeads, layer.numQueryGroups),
				};
			case "moe": {
				const ordered = Array.from({ length: layer.numExperts }, (_, expert) =>
					order(`channels of expert ${expert} in layer ${index}`, channels?.[expert], layer.moeFfnHiddenSize),
				);
				return {
					...wholeLayer,
					experts: order(`experts in layer ${index}`, experts, layer.numExperts, layer.moeRouterNumGroups),
					channels: (expert) => ordered[expert]!,
				};
			}
			default:
				return wholeLayer;
		}
	});
	return { hidden: order("embedding channels", importance.embedding, c.hiddenSize), layers };
}

/** Layers in rising order of importance, those to leave out first; null: it was not measured. */
export function layerRanking({ layers }: Importance): number[] | null {
	if (layers.some(({ layer }) => layer === null)) return null;
	return layers.map((_, index) => index).sort((a, b) => layers[a]!.layer! - layers[b]!.layer! || a - b);
}

// A checkpoint whose units are sorted by importance: the same function in another order, optimizer state along with its weights.

/** Owns `source`. `path`: of the ranking, for errors. */
export function permutedSource(source: SourceCheckpoint, importance: Importance, path: string): SourceCheckpoint {
	const { configuration } = parentOf(source);
	const model = selectTensors(source.weights, (name) => !name.startsWith("optimizer."));
	const selections = selectionsOf(model, configuration, unitsOfImportance(configuration, importance, path));
	const targets = new Map([...selections].map(([name, selection]) => [selection.source, { name, selection }]));
	const all = new Map<string, Selection>(selections);
	for (const name of source.weights.tensors.keys()) {
		const [state, parameter] = /^(optimizer\.state\.[^.]+\.)(.+)$/.exec(name)?.slice(1) ?? [];
		if (state === undefined) continue;
		const target = targets.get(parameter!);
		all.set(state + (target?.name ?? parameter), {
			...(target?.selection ?? { rows: null, columns: null }),
			source: name,
		});
	}
	const weights = new SelectedStore(source.weights, all);
	return { ...source, weights, [Symbol.dispose]: () => source[Symbol.dispose]() };
}
