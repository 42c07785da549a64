/** The file of export-kd-cfg: Model Optimizer's settings of a distillation (docs/spec/elastic.md §11). */
import * as v from "valibot";
import type { HybridConfig } from "../../models/language/config.ts";
import { UserError } from "../../system/errors.ts";
import type { HiddenLossName } from "../../tensor/index.ts";
import { readYaml } from "../elastic/from-configuration.ts";

/** Hidden states of a model: behind a layer, or behind a norm. */
export interface Point {
	/** The layer, counted as in the pattern. */
	readonly layer: number;
	/** The norm whose output they are: the layer's own, or the final one; null: they are the layer's output. */
	readonly norm: "input" | "final" | null;
}

/** Hidden states of the student that learn from the teacher's. */
export interface HiddenPair {
	readonly student: Point;
	readonly teacher: Point;
	readonly loss: HiddenLossName;
}

/** As DistillationOptions has them. */
export interface KdSettings {
	readonly temperature: number;
	readonly alpha: number;
	readonly rescaled: number | null;
	readonly pairs: readonly HiddenPair[];
}

const share = v.pipe(v.number(), v.minValue(0), v.maxValue(1));
const positive = v.pipe(v.number(), v.finite(), v.gtValue(0));
const names = v.array(v.string());
/** Model Optimizer's keys, what each allows, and that in words. */
const fields = {
	logit_layers: [v.literal("output_layer,output_layer"), '["output_layer", "output_layer"]'],
	intermediate_layer_pairs: [v.array(v.pipe(names, v.minLength(2), v.maxLength(3))), "a list of pairs of layers"],
	skip_lm_loss: [v.boolean(), "true or false"],
	kd_loss_scale: [positive, "a number greater than 0"],
	kd_loss_alpha: [share, "a number from 0 to 1"],
	logit_kl_temperature: [positive, "a number greater than 0"],
	logit_kl_topk: [v.null(), "null: all tokens of the vocabulary are compared"],
} as const;

/** Reads the file. `teacher`: the teacher's model. Throws a UserError that names the file and the key. */
export function readSettings(path: string, student: HybridConfig, teacher: HybridConfig): KdSettings {
	const content = readYaml(path, `export-kd-cfg ${path}`);
	const refuse = (what: string): never => {
		throw new UserError(`${path}: ${what}.`);
	};
	if (typeof content !== "object" || content === null || Array.isArray(content)) refuse("it is no table of keys");
	const said = content as Record<string, unknown>;
	for (const [key, value] of Object.entries(said)) {
		if (!(key in fields)) refuse(`${key} is no key of a distillation; allowed are ${Object.keys(fields).join(", ")}`);
		const [schema, allowed] = fields[key as keyof typeof fields];
		if (v.is(schema, key === "logit_layers" ? String(value) : value)) continue;
		refuse(`${key} is ${JSON.stringify(value)}; allowed is ${allowed}`);
	}
	const {
		skip_lm_loss: skips = true,
		kd_loss_scale: scale = 1,
		kd_loss_alpha: alpha = null,
		intermediate_layer_pairs: entries = [],
		logit_kl_temperature: temperature = 1,
	} = said as {
		skip_lm_loss?: boolean;
		kd_loss_scale?: number;
		kd_loss_alpha?: number;
		intermediate_layer_pairs?: readonly string[][];
		logit_kl_temperature?: number;
	};
	if (alpha !== null && ("skip_lm_loss" in said || "kd_loss_scale" in said)) {
		refuse("it has kd_loss_alpha and, of an older version, skip_lm_loss or kd_loss_scale; allowed is one of both ways");
	}
	const pairs = entries.map(([of, from, loss = "cosine"], at): HiddenPair => {
		const where = `${path}: intermediate_layer_pairs ${at + 1}`;
		if (loss !== "cosine" && loss !== "mse") throw new UserError(`${where}: the loss is ${loss}; it is cosine or mse.`);
		return {
			student: pointOf(of!, student, `${where}: the student`),
			teacher: pointOf(from!, teacher, `${where}: the teacher`),
			loss,
		};
	});
	if (pairs.length > 0 && student.hiddenSize !== teacher.hiddenSize) {
		refuse(
			`intermediate_layer_pairs needs a teacher of the student's hidden-size ${student.hiddenSize}; it has ${teacher.hiddenSize}`,
		);
	}
	return { temperature, alpha: alpha ?? (skips ? 1 : 0), rescaled: skips ? null : scale, pairs };
}

/** Megatron's name of a module whose output are hidden states, such as "decoder.layers.3.input_layernorm". Layers are blocks of the pattern. */
function pointOf(name: string, { pattern, blocks }: HybridConfig, where: string): Point {
	if (name === "decoder.final_layernorm" || name === "decoder.final_norm") {
		return { layer: pattern.length - 1, norm: "final" };
	}
	const [, index, norm = null] =
		/^decoder\.layers\.(\d+)(?:\.(input_layernorm|pre_mlp_layernorm|norm))?$/.exec(name) ?? [];
	if (index === undefined) {
		throw new UserError(
			`${where} has no hidden states ${name}; they are decoder.layers.N, its input_layernorm, pre_mlp_layernorm or norm, and decoder.final_layernorm.`,
		);
	}
	const block = Number(index);
	if (block >= blocks.length) throw new UserError(`${where} has ${blocks.length} layers, and no ${name}.`);
	const begin = blocks.slice(0, block).reduce((sum, length) => sum + length, 0);
	const end = begin + blocks[block]!;
	if (norm === null) return { layer: end - 1, norm: null };
	const behindMlp = norm === "pre_mlp_layernorm";
	const layer = behindMlp ? end - 1 : begin;
	if (["mlp", "moe"].includes(pattern[layer]!) === behindMlp) return { layer, norm: "input" };
	throw new UserError(`${where} has no ${name}: layer ${block} is ${pattern.slice(begin, end).join(" and ")}.`);
}
