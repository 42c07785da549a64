/**
 * Feed-forward layers of experts as one operation (docs/spec/moe-performance.md §1): both projections, the activation
 * between them and the biases. Backward keeps x and z of every row and computes the activation again.
 */
import { Activation, type ActivationName, MlpRecipe, type MlpRecipeName } from "../../native/abi.ts";
import { isGatedActivation } from "../../native/activations.ts";
import type { Device } from "../../native/device.ts";
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { contiguous, type FloatDtype, Tensor } from "../tensor.ts";
import type { GatedOptions } from "./activation.ts";
import { type E4m3Form, type E4m3Matrices, E4m3Rows } from "./e4m3.ts";
import { addGroupedWeightGradient } from "./grouped-linear.ts";

/** Stacks by expert. */
export interface ExpertWeights {
	/** [experts, F, H], or [experts, 2F, H] of a gated activation. */
	readonly fc1: Parameter;
	/** [experts, H, F]. */
	readonly fc2: Parameter;
	/** [experts, F or 2F]; null: none. */
	readonly fc1Bias: Parameter | null;
	/** [experts, H]; null: none. */
	readonly fc2Bias: Parameter | null;
}

/** Rows sorted by expert. */
export interface SortedRows {
	/** x_RH, f32 or bf16 as the weights, or the bytes of `inE4m3`. */
	readonly rows: Tensor;
	/** The rows in e4m3, where the operation that wrote them rounded them; the recipe e4m3Blockwise alone reads it. */
	readonly inE4m3?: E4m3Rows | null;
	/** f32 [R]: weight of every row. */
	readonly rowProbability: Tensor;
	/** int32 [experts + 1]: first row of every expert; rows from the last entry on are left alone. */
	readonly offsets: Tensor;
}

export interface GroupedMlpOptions extends GatedOptions {
	readonly activation: ActivationName;
	readonly recipe?: MlpRecipeName;
	/** Recipe of the weight gradients. */
	readonly weightGradientRecipe?: MlpRecipeName;
	/** Weight gradients run at the end of the tape's segment, so that they hide the exchange that sends the rows' gradients back. */
	readonly weightGradientsHide?: boolean;
	/** Called with z, the activation's input, where backward follows; null: not observed. */
	readonly onPreactivation?: ((z: Tensor) => void) | null;
	/** Called behind the operation with the forms of x and with z, where backward follows; null: not observed. */
	readonly onKept?: ((x: readonly Tensor[], z: Tensor) => void) | null;
}

/**
 * The form in which the layer takes x and the gradient of y; null: not in e4m3. Rows lie beside their e4m3 form where gradients of
 * weights or of biases read them unrounded.
 */
export function e4m3FormOf(
	{ recipe, weightGradientRecipe }: Pick<GroupedMlpOptions, "recipe" | "weightGradientRecipe">,
	biased: boolean,
): E4m3Form | null {
	if (recipe !== "e4m3Blockwise") return null;
	return weightGradientRecipe === "e4m3Blockwise" && !biased ? "alone" : "beside";
}

/** f32 or bf16, or in e4m3 alone. */
type Rows = Tensor | E4m3Rows;

function tensorsOf(rows: Rows): readonly Tensor[] {
	return rows instanceof Tensor ? [rows] : rows.tensors;
}

/** Where an operation writes rows. */
function addressesOf(rows: Rows | null) {
	if (rows === null || rows instanceof Tensor) return { stored: rows, values: null, factors: null };
	return { stored: null, values: rows.values, factors: rows.factors };
}

/** The layer as forward and backward read it. */
interface ExpertLayer {
	readonly sorted: SortedRows;
	readonly weights: ExpertWeights;
	readonly options: GroupedMlpOptions;
	readonly form: E4m3Form | null;
	/** Storage type of the weights, and of rows that are not in e4m3 alone. */
	readonly storage: FloatDtype;
	/** F, and the columns of z: 2F with a gated activation. */
	readonly width: number;
	readonly zWidth: number;
	/** The weights rounded to e4m3; null: they are read as stored. */
	readonly inE4m3: Readonly<Record<"fc1" | "fc2", E4m3Matrices>> | null;
	/** Arguments that both directions have. */
	readonly args: ReturnType<typeof sharedArguments>;
}

/**
 * y_RH = fc2(p act(fc1(x) + b1)) + p b2 for the rows of every expert, p the row's probability. The gradients of the weights
 * may be late, fc2's first; those of rows, probabilities and biases are not.
 */
export function groupedMlp(tape: Tape, sorted: SortedRows, weights: ExpertWeights, options: GroupedMlpOptions): Tensor {
	const layer = expertLayer(tape, sorted, weights, options);
	const { rows: x, rowProbability: p, offsets } = sorted;
	const { fc1, fc2, fc1Bias, fc2Bias } = weights;
	const { form, storage } = layer;
	const parameters = [fc2, fc1, fc2Bias, fc1Bias];
	const trains = parameters.some((parameter) => parameter?.trainable ?? false);
	const wanted = tape.recording && (x.gradient !== null || p.gradient !== null || trains);
	using all = tape.output(Tensor.empty(tape.device, [x.rows, fc2.shape[1]!], storage), wanted);
	const y = all.withRowCount(x.rowCount);
	const slot = y.gradient;
	if (slot) slot.wantsE4m3 = form;
	const z = wanted ? Tensor.empty(tape.device, [x.rows, layer.zWidth], storage) : null;
	using liveRows = liveRowsOf(layer);
	// Rows that an exchange wrote are not rounded yet.
	using own = form === "alone" && !sorted.inE4m3 ? E4m3Rows.of(x, liveRows) : null;
	const xInE4m3 = own ?? sorted.inE4m3 ?? null;
	runForward(tape.device, layer, xInE4m3, { z, y });
	if (z) options.onPreactivation?.(z);
	const kept = form === "alone" ? xInE4m3! : x;
	tape.record({
		name: "grouped_mlp",
		outputs: [y],
		keep: [...(fc1.trainable ? tensorsOf(kept) : []), p, offsets, x.rowCount],
		own: [z],
		parameters,
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			using dyInE4m3 = roundedGradient(layer, dy, slot!.takeE4m3());
			backward(tape, layer, { kept, z: z!, dy, dyInE4m3 });
		},
	});
	if (z) options.onKept?.(tensorsOf(kept), z);
	return y;
}

function expertLayer(
	{ recording, training }: Tape,
	sorted: SortedRows,
	weights: ExpertWeights,
	options: GroupedMlpOptions,
): ExpertLayer {
	const { fc1, fc2, fc1Bias, fc2Bias } = weights;
	const width = fc2.shape[2]!;
	const zWidth = isGatedActivation(options.activation) ? 2 * width : width;
	const form = e4m3FormOf(options, fc1Bias !== null || fc2Bias !== null);
	check(sorted, weights, { form, zWidth });
	// The first forward of a recomputed layer does not record, but its second reads both orders of the weights: one pass makes both.
	const order = { transposed: recording || training };
	const inE4m3 = form ? { fc1: fc1.inE4m3(order), fc2: fc2.inE4m3(order) } : null;
	const args = sharedArguments(sorted, weights, options, inE4m3);
	return { sorted, weights, options, form, storage: fc1.value.dtype as FloatDtype, width, zWidth, inE4m3, args };
}

function check(
	{ rows: x, offsets }: SortedRows,
	{ fc1, fc2 }: ExpertWeights,
	{ form, zWidth }: Pick<ExpertLayer, "form" | "zWidth">,
): void {
	const [experts, hidden] = fc2.shape as readonly [number, number, number];
	if (x.dtype === "u8" && form !== "alone") throw new RangeError(`${fc1.name} takes rows that are not in e4m3 alone.`);
	if (!x.contiguous || x.width !== hidden || offsets.elements !== experts + 1 || fc1.shape[1] !== zWidth) {
		throw new RangeError(
			`${fc1.name} of shape [${fc1.shape}] and ${fc2.name} of shape [${fc2.shape}] cannot take rows of shape ` +
				`[${x.shape}] with ${offsets.elements} offsets.`,
		);
	}
}

function sharedArguments(
	{ rows: x, rowProbability, offsets }: SortedRows,
	{ fc1, fc2, fc2Bias }: ExpertWeights,
	options: GroupedMlpOptions,
	inE4m3: ExpertLayer["inE4m3"],
) {
	const [experts, hidden, width] = fc2.shape as readonly [number, number, number];
	return {
		w1_factors: inE4m3?.fc1.factors ?? null,
		w2_factors: inE4m3?.fc2.factors ?? null,
		b2: fc2Bias?.value ?? null,
		row_probability: rowProbability,
		offsets,
		rows: x.rows,
		groups: experts,
		hidden,
		width,
		interleave: options.interleave ?? 0,
		clamp: options.clamp ?? Number.POSITIVE_INFINITY,
		linear_offset: options.linearOffset ?? 0,
		kind: Activation[options.activation],
		recipe: MlpRecipe[options.recipe ?? "plain"],
		dtype: fc1.value.dtypeCode,
	};
}

/** Number of rows that belong to experts, int32 [1] on the device. */
function liveRowsOf({ sorted: { offsets }, weights: { fc2 } }: ExpertLayer): Tensor {
	return offsets.columns(fc2.shape[0]!, 1);
}

/** Writes y and, where backward follows, z. */
function runForward(
	device: Device,
	{ sorted, weights: { fc1, fc2, fc1Bias }, form, inE4m3, args }: ExpertLayer,
	xInE4m3: E4m3Rows | null,
	to: { readonly z: Tensor | null; readonly y: Tensor },
): void {
	const read = inE4m3 ? { w1: inE4m3.fc1.values, w2: inE4m3.fc2.values } : { w1: fc1.value, w2: fc2.value };
	device.run("grouped_mlp_forward", {
		...args,
		...read,
		x: form === "alone" ? null : sorted.rows,
		x_e4m3: xInE4m3?.values ?? null,
		x_factors: xInE4m3?.factors ?? null,
		b1: fc1Bias?.value ?? null,
		...to,
	});
}

/** y's gradient in e4m3, as the operation that wrote it gave it or rounded here; null: it is not read so. */
function roundedGradient(layer: ExpertLayer, dy: Tensor, given: E4m3Rows | null): E4m3Rows | null {
	if (layer.form !== "alone" || given) return given;
	using liveRows = liveRowsOf(layer);
	return E4m3Rows.of(dy, liveRows);
}

interface BackwardRows {
	/** x as the gradient of fc1 reads it. */
	readonly kept: Rows;
	readonly z: Tensor;
	readonly dy: Tensor;
	readonly dyInE4m3: E4m3Rows | null;
}

/** Gradients of rows, probabilities and biases; those of the weights follow as weight gradients of the tape. */
function backward(tape: Tape, layer: ExpertLayer, { kept, z, dy, dyInE4m3 }: BackwardRows): void {
	const { sorted, weights, form } = layer;
	const { rows: x, rowProbability: p } = sorted;
	const { fc1, fc2 } = weights;
	const empty = (columns: number): Rows =>
		form === "alone"
			? new E4m3Rows(tape.device, x.rows, columns)
			: Tensor.empty(tape.device, [x.rows, columns], layer.storage);
	const dx = x.gradient?.contiguousTarget() ?? null;
	const dp = p.gradient?.contiguousTarget() ?? null;
	using dz = empty(layer.zWidth);
	using hs = fc2.trainable ? empty(layer.width) : null;
	runBackward(tape.device, layer, { z, dy, dyInE4m3 }, { dx, dp, dz, hs });
	if (hs) addWeightGradient(tape, layer, form === "alone" ? dyInE4m3! : dy, hs, fc2);
	if (fc1.trainable) addWeightGradient(tape, layer, dz, kept, fc1);
	if (dx) x.gradient!.accumulate(dx);
	if (dp) p.gradient!.accumulate(dp);
}

function runBackward(
	device: Device,
	{ weights: { fc1, fc2, fc1Bias, fc2Bias }, form, inE4m3, args }: ExpertLayer,
	{ z, dy, dyInE4m3 }: Omit<BackwardRows, "kept">,
	/** hs: the rows that fc2 reads, made anew for its weight gradient; null: frozen. */
	to: { readonly dx: Tensor | null; readonly dp: Tensor | null; readonly dz: Rows; readonly hs: Rows | null },
): void {
	const read = inE4m3 ? { w1: inE4m3.fc1.transposed, w2: inE4m3.fc2.transposed } : { w1: fc1.value, w2: fc2.value };
	const [dz, hs] = [addressesOf(to.dz), addressesOf(to.hs)];
	device.run("grouped_mlp_backward", {
		...args,
		...read,
		dy: form === "alone" ? null : dy,
		dy_e4m3: dyInE4m3?.values ?? null,
		dy_factors: dyInE4m3?.factors ?? null,
		z,
		dx: to.dx,
		dz: dz.stored,
		dz_e4m3: dz.values,
		dz_factors: dz.factors,
		hs: hs.stored,
		hs_e4m3: hs.values,
		hs_factors: hs.factors,
		drow_probability: to.dp,
		db1: fc1Bias?.mainGradient ?? null,
		db2: fc2Bias?.mainGradient ?? null,
	});
}

/** dweight_g += dyᵀ x of every expert g, at once or as a late task of the tape. */
function addWeightGradient(tape: Tape, { sorted, options }: ExpertLayer, dy: Rows, x: Rows, weight: Parameter): void {
	const { offsets } = sorted;
	const run = () => addGroupedWeightGradient(tape.device, dy, x, weight, offsets, options.weightGradientRecipe);
	tape.weightGradient([...tensorsOf(dy), ...tensorsOf(x), offsets], run, {
		hides: options.weightGradientsHide ?? false,
	});
}
