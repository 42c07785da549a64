/**
 * Maps keys of torch_dist checkpoints to logical names and back (docs/spec/checkpoint.md §3). On disk in_proj and conv1d are cut
 * into parts, experts and a vision tower's layers are stacked, and wrappers add `module.` segments; logical names have whole
 * tensors of single layers and experts, without wrappers.
 */
import { UserError } from "../../system/errors.ts";
import { elementCount } from "../dtype.ts";
import { type Correspondence, CorrespondenceBuilder } from "../mapping.ts";

type Shapes = ReadonlyMap<string, { readonly shape: readonly number[] }>;

/** The properties of a checkpoint's keys that logical names lack. A native manifest records them. */
export interface KeyStyle {
	/** Keys lack the prefix `language_model.`, as those of a language model alone do. */
	readonly plain: boolean;
	/** `module.` segments by the root that they follow ("language_model.", "modality_submodules.x."). */
	readonly wrappers: Readonly<Record<string, string>>;
	/** Modules with the elastic router, a copy for each pipeline stage (`router_pp0`, …); absent: there is no router. */
	readonly routers?: readonly string[];
}

/** Optimizer tensors by parameter: the name of the state, then the parameter's key. */
const optimizerKey = /^(?:mimo\.[^.]+\.)?optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq)\.(.+)$/;
/** Flat buffers of Megatron's distributed optimizer; see optimizer-buffers.ts. */
export const bufferKey =
	/^(?:mimo\.([^.]+)\.)?(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\((.*)\)\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)$/;

/** Parts of Gated DeltaNet's projection; its convolution has the first three (megatron/core/ssm/gated_delta_net/gdn.py). */
const deltaParts = ["query", "key", "value", "z", "beta", "alpha"];

/** Parts of a tensor in the order of its rows. */
const parts: readonly (readonly [RegExp, string, readonly string[]])[] = [
	[/mixer\.in_proj\.weight\.(z|x|B|C|dt)$/, "mixer.in_proj.weight", ["z", "x", "B", "C", "dt"]],
	[/mixer\.conv1d\.weight\.(x|B|C)$/, "mixer.conv1d_weight", ["x", "B", "C"]],
	[/mixer\.conv1d\.bias\.(x|B|C)$/, "mixer.conv1d_bias", ["x", "B", "C"]],
	[/self_attention\.in_proj\.weight\.(query|key|value|z|beta|alpha)$/, "self_attention.in_proj.weight", deltaParts],
	[/self_attention\.conv1d\.weight\.(query|key|value)$/, "self_attention.conv1d.weight", deltaParts.slice(0, 3)],
	[/linear_fc1\.weight_(w|v)$/, "linear_fc1.weight", ["w", "v"]],
];

const routerName = /^language_model\.(router(?:_pp\d+)?)\.(gate_[a-z_]+\.[02]\.weight)$/;
/** Prefix of the router's logical names. */
const routerPrefix = "elastic_router.";

const towerRoot = "modality_submodules.radio_encoder.";
/** Prefixes of the same modules in other models. */
const aliases: readonly (readonly [RegExp, string])[] = [
	[/^(?:(?:model|module)\.)+/, ""],
	[/^llava_model\./, ""],
	[/^(?:vision_model|radio_model)\./, `${towerRoot}encoders.radio_encoder.radio_model.`],
	[/^vision_projection\./, `${towerRoot}input_projections.0.`],
];

export interface ReadKeys {
	readonly correspondence: Correspondence;
	readonly style: KeyStyle;
	/** Keys of flat optimizer buffers, whose layout follows from the model (optimizer-buffers.ts). */
	readonly buffers: readonly string[];
}

/** Logical names for the tensors of a checkpoint. */
export function readKeys(stored: Shapes, path: string): ReadKeys {
	const builder = new CorrespondenceBuilder(path);
	const groups = new Groups(builder);
	const wrappers: Record<string, string> = {};
	const buffers: string[] = [];
	const routers = new Set<string>();
	let plain = false;
	// A tower that was trained alone has no name in front of its tensors.
	const ofTower = [...stored.keys()].some((key) => /^(?:(?:model|module)\.)*embedder\.weight$/.test(key));
	const [wrapper, ...others] = aliases;
	const names = ofTower ? [wrapper!, [/^/, "vision_model."] as const, ...others] : aliases;
	for (const [key, { shape }] of stored) {
		if (bufferKey.test(key)) {
			buffers.push(key);
			continue;
		}
		const optimizer = optimizerKey.exec(key);
		const state = optimizer ? `optimizer.state.${optimizer[1] === "fp32_param" ? "param" : optimizer[1]}.` : "";
		let name = optimizer ? optimizer[2]! : key;
		for (const [pattern, replacement] of names) name = name.replace(pattern, replacement);
		const root = /^(language_model\.|modality_submodules\.[^.]+\.)((?:module\.)*)/.exec(name);
		if (root) {
			name = root[1]! + name.slice(root[0].length);
			wrappers[root[1]!] = root[2]!;
		} else {
			plain = true;
			name = `language_model.${name}`;
		}
		builder.addForeign(key, shape);
		const router = routerName.exec(name);
		if (router) {
			// All stages have the same router; the first one's counts.
			routers.add(router[1]!);
			const logical = `${state}${routerPrefix}${router[2]}`;
			if (!builder.logical.has(logical)) {
				builder.addLogical(logical, shape);
				builder.link({ logical, foreign: key, count: 1, length: elementCount(shape)! });
			}
			continue;
		}
		unstack(builder, groups, path, key, state + name, shape, 0);
	}
	groups.close(path);
	const style = { plain, wrappers, ...(routers.size > 0 && { routers: [...routers] }) };
	return { correspondence: builder, style, buffers };
}

/** Links the layers and experts of a stacked tensor to their logical names. */
function unstack(
	builder: CorrespondenceBuilder,
	groups: Groups,
	path: string,
	foreign: string,
	name: string,
	shape: readonly number[],
	offset: number,
): void {
	const each = (names: (index: number) => string) => {
		const inner = shape.slice(1);
		const elements = elementCount(inner)!;
		if (shape.includes(0)) throw new UserError(`${path}: ${foreign} has the shape [${shape.join(", ")}], no elements.`);
		for (let i = 0; i < (shape[0] ?? 0); i++) {
			unstack(builder, groups, path, foreign, names(i), inner, offset + i * elements);
		}
	};
	const layers = /^(.*\bdecoder\.layers\.)(?!\d)(.*)$/.exec(name);
	if (layers) {
		each((i) => `${layers[1]}${i}.${layers[2]}`);
		return;
	}
	const experts = /^(.*\bmlp\.experts\.)experts\.(linear_fc[12])\.(weight|bias)$/.exec(name);
	if (experts) {
		each((i) => `${experts[1]}${experts[2]}.${experts[3]}${i}`);
		return;
	}
	// Upstream's form with a key for each expert; the halves of a gated weight are weight_w and weight_v.
	const single = /^(.*\bmlp\.experts\.)experts\.(\d+)\.(linear_fc[12])\.(weight|bias)(_[wv])?$/.exec(name);
	const logical = single ? `${single[1]}${single[3]}.${single[4]}${single[5] ?? ""}#${single[2]}` : name;
	for (const [pattern, whole, order] of parts) {
		const part = pattern.exec(logical.replace(/#\d+$/, ""));
		if (!part) continue;
		const suffix = /#(\d+)$/.exec(logical)?.[1] ?? "";
		const target = logical.replace(/#\d+$/, "").replace(pattern, whole) + suffix;
		groups.add(target, part[1]!, order, foreign, shape, offset);
		return;
	}
	const target = logical.replace("#", "");
	if (builder.logical.has(target)) {
		throw new UserError(`${path}: ${foreign} and another tensor are both ${target}.`);
	}
	builder.addLogical(target, shape);
	const length = elementCount(shape)!;
	builder.link({ logical: target, foreign, foreignRuns: { offset, stride: length }, count: 1, length });
}

/** Logical tensors that are stored in parts, collected until all parts are known. */
class Groups {
	readonly #groups = new Map<
		string,
		{ order: readonly string[]; found: Map<string, { foreign: string; shape: readonly number[]; offset: number }> }
	>();

	constructor(readonly builder: CorrespondenceBuilder) {}

	add(
		target: string,
		part: string,
		order: readonly string[],
		foreign: string,
		shape: readonly number[],
		offset: number,
	): void {
		let group = this.#groups.get(target);
		if (!group) {
			group = { order, found: new Map() };
			this.#groups.set(target, group);
		}
		group.found.set(part, { foreign, shape, offset });
	}

	close(path: string): void {
		for (const [logical, { order, found }] of this.#groups) {
			const missing = order.filter((part) => !found.has(part));
			if (missing.length > 0) throw new UserError(`${path}: parts ${missing.join(", ")} of ${logical} are missing.`);
			const tail = [...found.values()][0]!.shape.slice(1);
			const width = elementCount(tail)!;
			let row = 0;
			for (const part of order) {
				const { foreign, shape, offset } = found.get(part)!;
				if (shape.slice(1).join() !== tail.join()) throw new UserError(`${path}: ${foreign} has another width.`);
				const length = shape[0]! * width;
				this.builder.link({
					logical,
					logicalRuns: { offset: row * width, stride: length },
					foreign,
					foreignRuns: { offset, stride: length },
					count: 1,
					length,
				});
				row += shape[0]!;
			}
			if (this.builder.logical.has(logical)) throw new UserError(`${path}: ${logical} is stored twice.`);
			this.builder.addLogical(logical, [row, ...tail]);
		}
	}
}

/** The module of a root in optimizer keys, such as "language". */
function optimizerModule(root: string): string {
	return root === "language_model." ? "language" : root.split(".")[1]!;
}

/**
 * Keys for logical tensors, as current Megatron writes them (optimizer: `fully_reshardable`). `stacksLayers`: the language model's
 * layers are stacked along an axis, as a GPT model's are.
 */
export function writeKeys(logical: Shapes, style: KeyStyle, path: string, stacksLayers = false): Correspondence {
	const builder = new CorrespondenceBuilder(path);
	const stacks = new Map<string, StackMember[]>();
	for (const [name, { shape }] of logical) {
		const optimizer = /^optimizer\.state\.(param|exp_avg|exp_avg_sq)\.(.+)$/.exec(name);
		const parameter = optimizer ? optimizer[2]! : name;
		if (parameter.startsWith(routerPrefix)) {
			const state = optimizer ? `${style.plain ? "" : "mimo.language."}optimizer.state.${optimizer[1]}.` : "";
			const root = style.plain ? "" : `language_model.${style.wrappers["language_model."] ?? "module."}`;
			builder.addLogical(name, shape);
			for (const router of style.routers ?? ["router_pp0"]) {
				const key = `${state}${root}${router}.${parameter.slice(routerPrefix.length)}`;
				builder.addForeign(key, shape);
				builder.link({ logical: name, foreign: key, count: 1, length: elementCount(shape)! });
			}
			continue;
		}
		const root = /^(language_model\.|modality_submodules\.[^.]+\.)/.exec(parameter)?.[1];
		if (!root) throw new UserError(`${path}: tensor ${name} belongs to no module that Megatron knows.`);
		const inner = parameter.slice(root.length);
		const prefix = optimizer
			? `${style.plain ? "" : `mimo.${optimizerModule(root)}.`}optimizer.state.${optimizer[1]}.`
			: "";
		const key = prefix + (style.plain ? inner : root + (style.wrappers[root] ?? "module.") + inner);
		const stacked = root !== "language_model." || stacksLayers;
		const layer = stacked ? /^(.*\bdecoder\.layers\.)(\d+)\.(.*)$/.exec(key) : null;
		const inLayer = layer ? layer[1]! + layer[3]! : key;
		const expert = /^(.*\bmlp\.experts\.)(linear_fc[12])\.(weight|bias)(\d+)$/.exec(inLayer);
		builder.addLogical(name, shape);
		if (layer || expert) {
			const indices = [layer?.[2], expert?.[4]].filter((index) => index !== undefined).map(Number);
			pushTo(stacks, expert ? `${expert[1]}experts.${expert[2]}.${expert[3]}` : inLayer, { name, indices });
		} else if (!cut(builder, logical, name, parameter, key, shape)) builder.same(name, key, shape);
	}
	for (const [key, members] of stacks) stack(builder, logical, key, members, path);
	return builder;
}

/** A tensor of a stack, and its place on each of the stack's axes. */
interface StackMember {
	readonly name: string;
	readonly indices: readonly number[];
}

function pushTo<T>(map: Map<string, T[]>, key: string, value: T): void {
	const list = map.get(key);
	if (list) list.push(value);
	else map.set(key, [value]);
}

/** Cuts in_proj and conv1d of Mamba-2 and of Gated DeltaNet into their parts; false for any other tensor. */
function cut(
	builder: CorrespondenceBuilder,
	logical: Shapes,
	name: string,
	parameter: string,
	key: string,
	shape: readonly number[],
): boolean {
	const [, module, tensor] =
		/^(.*(?:mixer|self_attention)\.)(in_proj\.weight|conv1d[._]weight|conv1d_bias)$/.exec(parameter) ?? [];
	if (module === undefined) return false;
	const isDelta = module.endsWith("self_attention.");
	const norm = `${module}${isDelta ? "out_norm" : "norm"}.weight`;
	const heads = logical.get(`${module}A_log`)?.shape[0];
	const ofNorm = logical.get(norm)?.shape[0];
	if (ofNorm === undefined || heads === undefined) {
		throw new UserError(`${parameter} cannot be cut without ${norm} and ${module}A_log.`);
	}
	const projection = tensor === "in_proj.weight";
	// The norm of Gated DeltaNet is a head's.
	const inner = isDelta ? heads * ofNorm : ofNorm;
	const own = projection ? 2 * inner + (isDelta ? 2 : 1) * heads : inner;
	const state = (shape[0]! - own) / 2;
	if (!Number.isInteger(state) || state < 0) throw new UserError(`${name} has an invalid shape [${shape}].`);
	const [names, all] = isDelta
		? [deltaParts, [state, state, inner, inner, heads, heads]]
		: projection
			? [
					["z", "x", "B", "C", "dt"],
					[inner, inner, state, state, heads],
				]
			: [
					["x", "B", "C"],
					[inner, state, state],
				];
	const sizes = names.slice(0, projection ? undefined : 3).map((suffix, part) => [suffix, all[part]!] as const);
	const width = elementCount(shape.slice(1))!;
	let row = 0;
	for (const [suffix, rows] of sizes) {
		const foreign = `${key.replace(/conv1d_(weight|bias)$/, "conv1d.$1")}.${suffix}`;
		builder.addForeign(foreign, [rows, ...shape.slice(1)]);
		builder.rows({ logical: name, foreign, width, rows, logicalRow: row });
		row += rows;
	}
	return true;
}

function stack(
	builder: CorrespondenceBuilder,
	logical: Shapes,
	key: string,
	members: readonly StackMember[],
	path: string,
): void {
	const shape = logical.get(members[0]!.name)!.shape;
	const axes = members[0]!.indices.map(
		(_, axis) => 1 + members.reduce((last, m) => Math.max(last, m.indices[axis]!), 0),
	);
	const place = ({ indices }: StackMember) => indices.reduce((at, index, axis) => at * axes[axis]! + index, 0);
	const there = new Set(members.map(place));
	for (let i = 0; i < there.size; i++) {
		if (!there.has(i)) throw new UserError(`${path}: number ${i} of the tensors in ${key} is missing.`);
	}
	if (there.size < elementCount(axes)!) {
		throw new UserError(`${path}: number ${there.size} of the tensors in ${key} is missing.`);
	}
	const length = elementCount(shape)!;
	builder.addForeign(key, [...axes, ...shape]);
	for (const member of members) {
		const { name } = member;
		const other = logical.get(name)!.shape;
		if (other.join() !== shape.join()) throw new UserError(`${path}: ${name} has [${other}], the others [${shape}].`);
		builder.link({
			logical: name,
			foreign: key,
			foreignRuns: { offset: place(member) * length, stride: length },
			count: 1,
			length,
		});
	}
}
