/** The projections of a layer, with their adapters if the model has any (lora.ts). */
import { UserError } from "../../system/errors.ts";
import {
	addBias,
	addGroupedLowRank,
	addLowRank,
	cast,
	dropout,
	gemm,
	groupedLinear,
	joinColumns,
	type LowRank,
	linear,
	linearInE4m3,
	type Parameter,
	type Tape,
	type Tensor,
} from "../../tensor/index.ts";
import { philoxKey } from "../initialise.ts";
import { adapterName, adapterScale, isTarget } from "../lora.ts";
import { hasBias } from "./kinds/kind.ts";
import type { LayerContext } from "./layer-context.ts";

/**
 * x_TI of all tokens · weightᵀ of the layer's projection `name`. Row-parallel: x has this rank's columns, and the result is a
 * partial sum without the bias (addOutputBias). Column-parallel: the result includes the bias.
 */
export function project(tape: Tape, context: LayerContext, x: Tensor, name: string): Tensor {
	const bias = columnsAreCut(name) ? null : biasOf(context, name);
	const product = context.config.projectionRecipe === "plain" ? linear : inE4m3;
	const base = product(tape, x, context.weights(name), bias);
	const adapter = adapterOf(context, name);
	if (adapter === null) return base;
	using entering = adapterDropout(tape, context, x, name, adapter);
	return addLowRank(tape, base, entering, adapter);
}

function inE4m3(tape: Tape, x: Tensor, weight: Parameter, bias: Parameter | null): Tensor {
	if (tape.device.library.kind === "cuda" && weight.shape.some((width) => width % 16 !== 0)) {
		throw new UserError(
			`fp8-modules projections needs widths in steps of 16 on device cuda; a rank has [${weight.shape.join(", ")}] of ${weight.name}.`,
		);
	}
	return linearInE4m3(tape, x, weight, bias);
}

/**
 * The projection `name` of routed experts: x_RI sorted by expert → y_RO. `factor`: f32 [R], factor of each row's bias; default 1.
 */
export function projectByExpert(
	tape: Tape,
	context: LayerContext,
	x: Tensor,
	name: string,
	{
		offsets,
		factor = null,
		weightGradientHides = false,
	}: { readonly offsets: Tensor; readonly factor?: Tensor | null; readonly weightGradientHides?: boolean },
): Tensor {
	const product = groupedLinear(tape, x, context.weights(name), offsets, { weightGradientHides });
	const bias = biasOf(context, name);
	const base = bias ? addBias(tape, product, bias, { offsets, factor }) : product;
	const adapter = adapterOf(context, name);
	return adapter === null ? base : addGroupedLowRank(tape, base, x, adapter, offsets);
}

/** Adds the bias of a row-parallel projection to this rank's tokens of the reduced sum; takes over y_TH. */
export function addOutputBias(tape: Tape, context: LayerContext, y: Tensor, name: string): Tensor {
	const bias = biasOf(context, name);
	return bias ? addBias(tape, y, bias) : y;
}

/** A projection's bias by its weight's name; null: it has none. */
export function biasOf({ config, weights }: LayerContext, name: string): Parameter | null {
	return hasBias(config, name) ? weights(name.replace(/weight$/, "bias")) : null;
}

/** A projection's weight; with an adapter the sum of both, in fp32. */
export function weightWithAdapter(context: LayerContext, name: string): Tensor {
	const { value } = context.weights(name);
	const adapter = adapterOf(context, name);
	if (adapter === null) return value.share();
	const whole = cast(value, "f32");
	const [b, a] = [adapter.b, adapter.a].map((matrix) => ({ tensor: matrix.value, transposed: false }));
	gemm(value.device, b!, a!, whole, { alpha: adapter.scale, beta: 1 });
	return whole;
}

/** Whether a projection has an adapter. */
export function hasAdapter({ config }: LayerContext, name: string): boolean {
	return config.lora !== null && isTarget(config.lora, name);
}

function adapterOf({ config, weights }: LayerContext, name: string): LowRank | null {
	const { lora } = config;
	if (lora === null || !isTarget(lora, name)) return null;
	return { a: weights(adapterName(name, "a")), b: weights(adapterName(name, "b")), scale: adapterScale(lora) };
}

/** Dropout of an adapter's input; a row-parallel projection's input has this rank's columns only. */
function adapterDropout(tape: Tape, context: LayerContext, x: Tensor, name: string, { a }: LowRank): Tensor {
	const { lora } = context.config;
	const probability = tape.training ? lora!.dropout : 0;
	if (probability === 0) return x.share();
	const { key, tokens, localTokens, place } = context.random;
	const { rank, size } = context.parallel.tp;
	const cut = columnsAreCut(name);
	using rowsInOrder = x.contiguous ? x.share() : joinColumns(tape, [x]);
	return dropout(tape, rowsInOrder, {
		probability,
		seed: philoxKey(key, `${place}.${name}.lora_dropout`),
		rows: readsOwnTokens(name) ? localTokens : tokens,
		firstColumn: cut ? rank * a.value.width : 0,
		fullWidth: cut ? size * a.value.width : a.value.width,
	});
}

/** Whether a projection is replicated, and each rank's input its own tokens: those to latents are. */
function readsOwnTokens(name: string): boolean {
	return /\.linear_(q|kv)_down_proj\.weight$/.test(name);
}

/** Whether a projection is row-parallel: those into the residual stream are. */
function columnsAreCut(name: string): boolean {
	return /\.(linear_proj|linear_fc2|out_proj)\.weight$/.test(name);
}
