/** Memory of an elastic model that generates text, in GB of 1024³ bytes (docs/spec/elastic.md §7). */

import type { HybridConfig } from "../../models/language/config.ts";
import { UserError } from "../../system/errors.ts";
import {
	type CountRule,
	type CountTarget,
	countParameters,
	type Differentiable,
	emptySizes,
	type Sizes,
} from "./counts.ts";

/** Bytes of an element. */
export interface MemoryProfile {
	readonly parameters: number;
	readonly kvCache: number;
	readonly ssmCache: number;
	/** Of the buffer of routed experts' rows. */
	readonly buffer: number;
	readonly target: CountTarget;
}

const preset = (parameters: number, kvCache: number, ssmCache: number, buffer: number): MemoryProfile => ({
	parameters,
	kvCache,
	ssmCache,
	buffer,
	target: "active",
});

export const memoryProfiles = {
	bf16: preset(2, 2, 2, 2),
	fp8_kv: preset(2, 1, 2, 2),
	fp8_kv_ssm: preset(2, 1, 1, 2),
	fp8_all: preset(1, 1, 1, 1),
	int8: preset(1, 1, 1, 2),
	fp4: preset(0.5625, 0.5625, 1, 2),
} as const;

/** Keys of a profile in a file: those of Megatron's files, or of its flags. */
const fileKeys = {
	params: "parameters",
	kv_cache: "kvCache",
	ssm_cache: "ssmCache",
	max_buffer: "buffer",
	bpe_params: "parameters",
	bpe_kv_cache: "kvCache",
	bpe_ssm_cache: "ssmCache",
	bpe_max_buffer: "buffer",
	param_budget_target: "target",
} as const;

/**
 * A profile by its name; keys that are not its own are those of bf16. `own`: profiles of a file, whose content was read.
 * `overrides`: each stands above the profile. Throws a UserError that lists what there is.
 */
export function resolveProfile(
	name: string | null,
	overrides: { readonly [Key in keyof MemoryProfile]?: MemoryProfile[Key] | null } = {},
	own: unknown = null,
	path = "the file",
): MemoryProfile {
	const given = own === null ? memoryProfiles : profilesOf(own, path);
	const found = given[(name ?? "bf16") as keyof typeof given] as Partial<MemoryProfile> | undefined;
	if (found === undefined) {
		throw new UserError(`memory-profile is ${name}; allowed are ${Object.keys(given).join(", ")}.`);
	}
	const set = Object.fromEntries(Object.entries(overrides).filter(([, value]) => value !== null));
	return { ...memoryProfiles.bf16, ...found, ...set };
}

function profilesOf(content: unknown, path: string): Record<string, Partial<MemoryProfile>> {
	const refuse = (what: string): never => {
		throw new UserError(`${path}: ${what}.`);
	};
	const isTable = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null;
	const table = isTable(content) ? (content.presets ?? content.profiles) : null;
	const profiles = isTable(table) ? table : content;
	if (!isTable(profiles)) return refuse("it is no table of memory profiles");
	return Object.fromEntries(
		Object.entries(profiles).map(([name, profile]) => {
			if (!isTable(profile)) return refuse(`${name} is no table`);
			const entries = Object.entries(profile).map(([key, value]) => {
				const known = fileKeys[key as keyof typeof fileKeys];
				if (known === undefined)
					refuse(`${name}.${key} is no key of a memory profile; allowed are ${Object.keys(fileKeys).join(", ")}`);
				const legal =
					known === "target" ? value === "active" || value === "total" : Number.isFinite(value) && Number(value) > 0;
				if (!legal) {
					refuse(
						`${name}.${key} is ${JSON.stringify(value)}; allowed is ${known === "target" ? "active or total" : "a number greater than 0"}`,
					);
				}
				return [known, value];
			});
			return [name, Object.fromEntries(entries)];
		}),
	);
}

/** The use that is budgeted. */
export interface MemoryUse {
	readonly profile: MemoryProfile;
	readonly batchSize: number;
	readonly sequenceLength: number;
	readonly prefillChunk: number;
}

const gigabyte = 2 ** 30;

/** Parts of the memory, in GB. */
export type MemoryParts = Omit<MemoryProfile, "target">;

export function memoryOf(
	model: HybridConfig,
	sizes: Sizes,
	use: MemoryUse,
	rule: CountRule = "exact",
): Differentiable & { readonly parts: MemoryParts } {
	const { profile, batchSize, sequenceLength, prefillChunk } = use;
	const { pattern, attention, mamba, moe } = model;
	const counted = countParameters(model, sizes, profile.target, rule);
	const gradient = emptySizes(pattern.length);
	const perParameter = profile.parameters / gigabyte;
	gradient.hidden = perParameter * counted.gradient.hidden;
	const layer = {
		kv: (2 * profile.kvCache * batchSize * sequenceLength * attention.queryGroups * attention.headDim) / gigabyte,
		ssm: (profile.ssmCache * batchSize * mamba.headDim * mamba.stateDim) / gigabyte,
		buffer: (profile.buffer * batchSize * prefillChunk) / gigabyte,
	};
	const rows = pattern.map((_, at) => moe.sharedExpertSize + sizes.ffn[at]! * moe.topk);
	const soft = softMaximum(pattern.map((kind, at) => (kind === "moe" ? sizes.keep[at]! * rows[at]! : null)));
	let [kvCache, ssmCache] = [0, 0];
	for (const [at, kind] of pattern.entries()) {
		const keep = sizes.keep[at]!;
		for (const key of ["mambaHeads", "ffn", "experts", "heads", "keep"] as const)
			gradient[key][at] = perParameter * counted.gradient[key][at]!;
		if (kind === "attention") {
			kvCache += keep * layer.kv;
			gradient.keep[at]! += layer.kv;
		} else if (kind === "mamba") {
			const heads = sizes.mambaHeads[at]!;
			ssmCache += keep * layer.ssm * heads;
			gradient.mambaHeads[at]! += keep * layer.ssm;
			gradient.keep[at]! += layer.ssm * heads;
		} else if (kind === "moe") {
			const slope = layer.buffer * soft.gradient[at]!;
			gradient.ffn[at]! += slope * keep * moe.topk;
			gradient.keep[at]! += slope * rows[at]!;
		}
	}
	const parts = { parameters: perParameter * counted.value, kvCache, ssmCache, buffer: layer.buffer * soft.value };
	return { value: parts.parameters + kvCache + ssmCache + parts.buffer, gradient, parts };
}

/** Σ wᵢ xᵢ, w = softmax(x), and its gradient; null entries are not there. */
function softMaximum(values: readonly (number | null)[]): { readonly value: number; readonly gradient: number[] } {
	const there = values.filter((x) => x !== null);
	if (there.length === 0) return { value: 0, gradient: values.map(() => 0) };
	const largest = Math.max(...there);
	const weights = values.map((x) => (x === null ? 0 : Math.exp(x - largest)));
	const sum = weights.reduce((total, w) => total + w, 0);
	const value = weights.reduce((total, w, at) => total + (w / sum) * (values[at] ?? 0), 0);
	return { value, gradient: weights.map((w, at) => (w / sum) * (1 + (values[at] ?? 0) - value)) };
}
