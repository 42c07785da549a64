/**
 * RADIO's tensors: Megatron's logical names and Hugging Face's (vision.md §1.3, §1.9; checkpoint.md §4.4). Shapes are
 * those that are stored; the one thing names and shapes do not tell is the number of heads.
 */
import { UserError } from "../../native/errors.ts";
import { elementCount } from "../dtype.ts";
import type { CorrespondenceBuilder } from "../mapping.ts";

type Shapes = ReadonlyMap<string, { readonly shape: readonly number[] }>;

export const towerPrefix = "modality_submodules.radio_encoder.encoders.radio_encoder.radio_model.";
export const projectorPrefix = "modality_submodules.radio_encoder.input_projections.0.";

/** Names in front of a tower's tensors in published vision-language checkpoints. */
export const publishedTower = "vision_model.radio_model.model.";
/** The projector's modules there; mlp1.2 is the activation. */
const projector: readonly (readonly [string, string])[] = [
	["mlp1.0.weight", "encoder.linear_fc1.layer_norm_weight"],
	["mlp1.1.weight", "encoder.linear_fc1.weight"],
	["mlp1.3.weight", "encoder.linear_fc2.weight"],
	["multi_modal_projector.layer_norm.weight", "encoder.linear_fc1.layer_norm_weight"],
	["multi_modal_projector.linear_1.weight", "encoder.linear_fc1.weight"],
	["multi_modal_projector.linear_2.weight", "encoder.linear_fc2.weight"],
];

/** Tower tensors outside the blocks. */
const outside: readonly (readonly [string, string])[] = [
	["patch_generator.cls_token.token", "class_token"],
	["patch_generator.pos_embed", "position_embeddings"],
	["patch_generator.embedder.weight", "embedder.weight"],
	["patch_generator.video_embedder.weight", "video_embedder.weight"],
];
/** The same under the names of transformers' own class. */
const outsideTransformers: readonly (readonly [string, string])[] = [
	["embeddings.cls_register_token", "class_token"],
	["embeddings.position_embedding", "position_embeddings"],
	["embeddings.patch_projection.weight", "embedder.weight"],
	["embeddings.video_patch_projection.weight", "video_embedder.weight"],
];

/** Inside block i, without the fused projection. */
const inside: readonly (readonly [string, string])[] = [
	["norm1.weight", "self_attention.linear_qkv.layer_norm_weight"],
	["norm1.bias", "self_attention.linear_qkv.layer_norm_bias"],
	["attn.proj.weight", "self_attention.linear_proj.weight"],
	["attn.proj.bias", "self_attention.linear_proj.bias"],
	["norm2.weight", "mlp.linear_fc1.layer_norm_weight"],
	["norm2.bias", "mlp.linear_fc1.layer_norm_bias"],
	["mlp.fc1.weight", "mlp.linear_fc1.weight"],
	["mlp.fc1.bias", "mlp.linear_fc1.bias"],
	["mlp.fc2.weight", "mlp.linear_fc2.weight"],
	["mlp.fc2.bias", "mlp.linear_fc2.bias"],
];
const outputNames = /^attention\.(?:output\.dense|o_proj)\./;
const partNames = /^attention\.(?:attention\.)?(query|key|value|q_proj|k_proj|v_proj)\.(weight|bias)$/;

/** Prefix of a RADIO tower among a folder's tensors, or null. */
export function detectTower(names: Iterable<string>): string | null {
	for (const name of names) {
		const found = /^(.*)(?:patch_generator\.embedder|embeddings\.patch_projection)\.weight$/.exec(name);
		if (found) return found[1]!;
	}
	return null;
}

/** The tower's heads as a config.json says them, of the tower alone or of a model with one; null: it does not. */
export function headsOfConfig(json: Readonly<Record<string, unknown>>): number | null {
	const nested = json.vision_config;
	const own = /radio/i.test(String(json.model_type)) ? json : {};
	const { num_attention_heads: heads } = (typeof nested === "object" && nested !== null ? nested : own) as Readonly<
		Record<string, unknown>
	>;
	return Number.isSafeInteger(heads) && (heads as number) > 0 ? (heads as number) : null;
}

/** Heads of the usual widths; null for others. */
export function headsOfWidth(width: number): number | null {
	return { 384: 6, 768: 12, 1024: 16, 1280: 16 }[width] ?? null;
}

/** From a folder's tensors (any spelling): links every tensor of the tower and the projector. */
export function visionFromHuggingFace(
	builder: CorrespondenceBuilder,
	stored: Shapes,
	tower: string,
	heads: number | null,
	path: string,
): void {
	const same = (logical: string, foreign: string, shape: readonly number[]) => {
		builder.addLogical(logical, shape);
		builder.addForeign(foreign, stored.get(foreign)!.shape);
		builder.link({ logical, foreign, count: 1, length: elementCount(shape)! });
	};
	const outer = new Map([...outside, ...outsideTransformers]);
	const parts = new Map<string, Partial<Record<"q" | "k" | "v", string>>>();
	for (const [name, { shape }] of stored) {
		const projected = projector.find(([foreign]) => foreign === name)?.[1];
		if (projected !== undefined) {
			same(projectorPrefix + projected, name, shape);
			continue;
		}
		if (!name.startsWith(tower)) continue;
		const rest = name.slice(tower.length);
		const single = outer.get(rest);
		if (single !== undefined) {
			// transformers keeps the class tokens with a leading batch axis.
			same(towerPrefix + single, name, single === "class_token" && shape.length === 3 ? shape.slice(1) : shape);
			continue;
		}
		const block = /^(?:blocks|encoder\.layer|encoder\.layers)\.(\d+)\.(.+)$/.exec(rest);
		if (!block) continue;
		const layer = `${towerPrefix}decoder.layers.${block[1]}.`;
		const inner = block[2]!.replace(outputNames, "attn.proj.");
		const plain = inside.find(([foreign]) => foreign === inner)?.[1];
		const part = partNames.exec(inner);
		const fused = /^attn\.qkv\.(weight|bias)$/.exec(inner);
		if (plain !== undefined) same(layer + plain, name, shape);
		else if (fused) {
			const logical = `${layer}self_attention.linear_qkv.${fused[1]}`;
			linkFused(builder, logical, { q: name, k: name, v: name }, shape, headsOf(heads, shape[0]! / 3, path));
		} else if (part) {
			const key = `${layer}self_attention.linear_qkv.${part[2]}`;
			parts.set(key, { ...parts.get(key), [part[1]![0]!]: name });
		}
	}
	for (const [logical, { q, k, v }] of parts) {
		if (!q || !k || !v) throw new UserError(`${path}: query, key or value of ${logical} is missing.`);
		const shape = stored.get(q)!.shape;
		linkFused(builder, logical, { q, k, v }, shape.with(0, 3 * shape[0]!), headsOf(heads, shape[0]!, path));
	}
}

function headsOf(heads: number | null, width: number, path: string): number {
	const found = heads ?? headsOfWidth(width);
	if (found === null) {
		throw new UserError(
			`${path}: a vision tower of width ${width} has an unknown number of heads; name it with --vision-num-attention-heads.`,
		);
	}
	if (width % found !== 0)
		throw new UserError(`${path}: ${found} heads do not divide a vision tower of width ${width}.`);
	return found;
}

/** Rows of linear_qkv: per head query, key, value; the foreign side has all queries, then keys, then values. */
function linkFused(
	builder: CorrespondenceBuilder,
	logical: string,
	foreign: { readonly q: string; readonly k: string; readonly v: string },
	shape: readonly number[],
	heads: number,
): void {
	const width = elementCount(shape.slice(1))!;
	const total = shape[0]! / 3;
	const d = total / heads;
	builder.addLogical(logical, shape);
	(["q", "k", "v"] as const).forEach((part, index) => {
		const fused = foreign.q === foreign.v;
		builder.addForeign(foreign[part], fused ? shape : shape.with(0, total));
		builder.rows({
			logical,
			foreign: foreign[part],
			width,
			rows: d,
			count: heads,
			logicalRow: index * d,
			logicalStride: 3 * d,
			foreignRow: fused ? index * total : 0,
		});
	});
}

/** To published names. Logical tensors without a place there are returned. */
export function visionToHuggingFace(
	builder: CorrespondenceBuilder,
	logical: Shapes,
	heads: number | null,
	path: string,
): string[] {
	const homeless: string[] = [];
	for (const [name, { shape }] of logical) {
		const projected = projector.find(([, mine]) => projectorPrefix + mine === name)?.[0];
		if (projected !== undefined) builder.same(name, projected, shape);
		if (projected !== undefined || !name.startsWith("modality_submodules.")) continue;
		const rest = name.startsWith(towerPrefix) ? name.slice(towerPrefix.length) : "";
		const single = outside.find(([, mine]) => mine === rest)?.[0];
		const block = /^decoder\.layers\.(\d+)\.(.+)$/.exec(rest);
		const plain = inside.find(([, mine]) => mine === block?.[2])?.[0];
		const fused = /^self_attention\.linear_qkv\.(weight|bias)$/.exec(block?.[2] ?? "");
		if (single !== undefined) builder.same(name, publishedTower + single, shape);
		else if (plain !== undefined) builder.same(name, `${publishedTower}blocks.${block![1]}.${plain}`, shape);
		else if (fused) {
			const foreign = `${publishedTower}blocks.${block![1]}.attn.qkv.${fused[1]}`;
			linkFused(builder, name, { q: foreign, k: foreign, v: foreign }, shape, headsOf(heads, shape[0]! / 3, path));
		} else homeless.push(name);
	}
	return homeless;
}
