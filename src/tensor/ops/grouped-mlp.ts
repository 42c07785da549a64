/**
 * Feed-forward layers of experts as one operation (docs/spec/moe-performance.md §1): both projections, the activation
 * between them and the biases. Of a row x and z are kept for backward; the activation is made anew.
 */
import { Activation, type ActivationName, Dtype, MlpRecipe, type MlpRecipeName } from "../../native/abi.ts";
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { contiguous, type FloatDtype, Tensor } from "../tensor.ts";
import { type GatedOptions, isGatedActivation } from "./activation.ts";
import { type E4m3Form, E4m3Rows } from "./e4m3-rows.ts";
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
	/** Of the gradients of the weights. */
	readonly weightGradientRecipe?: MlpRecipeName;
	/** Weight gradients run at the end of the segment, so that they hide the way back of the exchange that brought the rows. */
	readonly weightGradientsHide?: boolean;
}

/**
 * The form in which the layer takes x and the gradient of y; null: not in e4m3. Gradients of weights and of biases read rows as they
 * are, those of weights in e4m3 do not.
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

/**
 * y_RH = fc2(p act(fc1(x) + b1)) + p b2 for the rows of every expert, p the row's probability. The gradients of the weights
 * may be late, fc2's first; those of rows, probabilities and biases are not.
 */
export function groupedMlp(tape: Tape, sorted: SortedRows, weights: ExpertWeights, options: GroupedMlpOptions): Tensor {
	const { device } = tape;
	const { rows: x, rowProbability: p, offsets } = sorted;
	const { fc1, fc2, fc1Bias, fc2Bias } = weights;
	const [experts, hidden, width] = fc2.shape as readonly [number, number, number];
	const zWidth = isGatedActivation(options.activation) ? 2 * width : width;
	const form = e4m3FormOf(options, fc1Bias !== null || fc2Bias !== null);
	if (x.dtype === "u8" && form !== "alone") throw new RangeError(`${fc1.name} takes rows that are not in e4m3 alone.`);
	if (!x.contiguous || x.width !== hidden || offsets.elements !== experts + 1 || fc1.shape[1] !== zWidth) {
		throw new RangeError(
			`${fc1.name} of shape [${fc1.shape}] and ${fc2.name} of shape [${fc2.shape}] cannot take rows of shape ` +
				`[${x.shape}] with ${offsets.elements} offsets.`,
		);
	}
	// Where recomputation follows, its second forward wants gradients: both orders are made in one pass here.
	const order = { transposed: tape.recording || tape.training };
	const storage = fc1.value.dtype as FloatDtype;
	const inE4m3 = form ? { fc1: fc1.inE4m3(order), fc2: fc2.inE4m3(order) } : null;
	const factors = { w1_factors: inE4m3?.fc1.factors ?? null, w2_factors: inE4m3?.fc2.factors ?? null };
	const args = {
		...factors,
		b2: fc2Bias?.value ?? null,
		row_probability: p,
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
		dtype: Dtype[storage],
	};
	const parameters = [fc2, fc1, fc2Bias, fc1Bias];
	const trains = parameters.some((parameter) => parameter?.trainable ?? false);
	const wanted = tape.recording && (x.gradient !== null || p.gradient !== null || trains);
	using all = tape.output(Tensor.empty(device, [x.rows, hidden], storage), wanted);
	const y = all.withRowCount(x.rowCount);
	const slot = y.gradient;
	if (slot) slot.wantsE4m3 = form;
	const z = wanted ? Tensor.empty(device, [x.rows, zWidth], storage) : null;
	const read = inE4m3 ? { w1: inE4m3.fc1.values, w2: inE4m3.fc2.values } : { w1: fc1.value, w2: fc2.value };
	using liveRows = offsets.columns(experts, 1);
	// Rows that an exchange wrote are not rounded yet.
	using own = form === "alone" && !sorted.inE4m3 ? E4m3Rows.of(x, liveRows) : null;
	const xInE4m3 = own ?? sorted.inE4m3 ?? null;
	const kept = form === "alone" ? xInE4m3! : x;
	device.run("grouped_mlp_forward", {
		...args,
		...read,
		x: form === "alone" ? null : x,
		x_e4m3: xInE4m3?.values ?? null,
		x_factors: xInE4m3?.factors ?? null,
		b1: fc1Bias?.value ?? null,
		z,
		y,
	});
	tape.record({
		name: "grouped_mlp",
		outputs: [y],
		keep: [...(fc1.trainable ? tensorsOf(kept) : []), p, offsets, x.rowCount],
		own: [z],
		parameters,
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			using liveRows = offsets.columns(experts, 1);
			const given = slot!.takeE4m3();
			using dyInE4m3 = form === "alone" && !given ? E4m3Rows.of(dy, liveRows) : given;
			const dx = x.gradient?.contiguousTarget() ?? null;
			const dp = p.gradient?.contiguousTarget() ?? null;
			const empty = (columns: number) =>
				form === "alone" ? new E4m3Rows(device, x.rows, columns) : Tensor.empty(device, [x.rows, columns], storage);
			using dz = empty(zWidth);
			using hs = fc2.trainable ? empty(width) : null;
			const [dzTo, hsTo] = [addressesOf(dz), addressesOf(hs)];
			const read = inE4m3 ? { w1: inE4m3.fc1.transposed, w2: inE4m3.fc2.transposed } : { w1: fc1.value, w2: fc2.value };
			device.run("grouped_mlp_backward", {
				...args,
				...read,
				dy: form === "alone" ? null : dy,
				dy_e4m3: dyInE4m3?.values ?? null,
				dy_factors: dyInE4m3?.factors ?? null,
				z,
				dx,
				dz: dzTo.stored,
				dz_e4m3: dzTo.values,
				dz_factors: dzTo.factors,
				hs: hsTo.stored,
				hs_e4m3: hsTo.values,
				hs_factors: hsTo.factors,
				drow_probability: dp,
				db1: fc1Bias?.mainGradient ?? null,
				db2: fc2Bias?.mainGradient ?? null,
			});
			const order = { hides: options.weightGradientsHide ?? false };
			const addGradient = (dy: Rows, x: Rows, weight: Parameter) => {
				const run = () => addGroupedWeightGradient(device, dy, x, weight, offsets, options.weightGradientRecipe);
				tape.weightGradient([...tensorsOf(dy), ...tensorsOf(x), offsets], run, order);
			};
			if (hs) addGradient(form === "alone" ? dyInE4m3! : dy, hs, fc2);
			if (fc1.trainable) addGradient(dz, kept, fc1);
			if (dx) x.gradient!.accumulate(dx);
			if (dp) p.gradient!.accumulate(dp);
		},
	});
	return y;
}
