/**
 * The run that every layout is compared with: one process that holds all modules. Kept in a folder, where the ranks of
 * the layouts read it, together with the noise of this machine: an equally right run, rounded otherwise.
 */
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import {
	copyBlocks,
	openSafetensors,
	type SafetensorsFile,
	type TensorArray,
	type TensorEntry,
	writeSafetensors,
} from "../../checkpoint/index.ts";
import type { MlpRecipeName } from "../../native/abi.ts";
import { layoutFor, namedTopology, parseLayout, type World } from "../../parallel/index.ts";
import { copyInto, elementCount, Tensor } from "../../tensor/index.ts";
import { languageModelLoss } from "../../train/losses.ts";
import type { StepResult } from "../../train/step-state.ts";
import { type Engine, openEngine } from "./engine.ts";
import { type ClampCounts, ClampMeter, OperandReplay, type Operands, recordOperands } from "./operands.ts";
import { RoutingTable } from "./routing.ts";
import { numbersFrom, type Plan, planOf } from "./samples.ts";
import { encoderNames, microBatchSizes, plainOrder, type Subject } from "./subject.ts";

/** Values that are compared tensor by tensor: step 1's gradients, weights after the optimizer alone, after real steps. */
export const kinds = ["gradient", "updated", "stepped"] as const;
export type Kind = (typeof kinds)[number];

/** Real steps. */
export const realSteps = 2;

/** Runs with other rounding: the change of a tensor with few elements varies much from run to run. */
const noiseRuns = 3;

export type Scalars = Pick<StepResult, "loss" | "losses" | "tokens" | "gradientNorm" | "balancing">;

export interface ReferenceTensor {
	readonly name: string;
	readonly elements: number;
	/** Root mean square of each kind; 0 for the gradient of a frozen tensor. */
	readonly rms: Readonly<Record<Kind, number>>;
	/** Root mean square of the gradient's difference between the reference and a run with other rounding, the largest one. */
	readonly noise: number;
}

/** Values that experts round to e4m3 in a layer (operands.ts). */
export interface ReferenceOperand {
	readonly name: string;
	/** Largest relative difference between the reference and a run with other rounding, root mean square. */
	readonly noise: number;
}

export interface Reference {
	readonly microBatchSize: number;
	readonly microbatches: number;
	readonly scalars: Scalars;
	/** Scalars of the runs with other rounding that route every token and clamp every value as the reference does. */
	readonly noise: readonly Scalars[];
	/** Routing decisions and clamps that runs with other rounding flip. Differences of such a run are no measure of noise. */
	readonly noiseFlips: number;
	/** How products of experts round their operands. */
	readonly recipe: MlpRecipeName;
	/** Empty where experts do not round. */
	readonly operands: readonly ReferenceOperand[];
	/** activation-func-clamp-value; null: none. */
	readonly clamp: number | null;
	readonly clipFactor: number;
	readonly tensors: readonly ReferenceTensor[];
}

const files = { values: "reference.safetensors", description: "reference.json" } as const;

/** Layout `1`, as the reference runs on it. */
export function referencePlan(subject: Subject): Plan {
	return planOf(
		namedTopology(layoutFor(parseLayout("1"), { encoders: subject.encoders.length }), encoderNames(subject)),
		{
			samples: subject.samples.length,
			microBatchSize: microBatchSizes(subject).reference,
			sequenceLength: subject.sequenceLength,
		},
	);
}

/** Trains layout `1` and writes the folder. */
export async function makeReference(world: World, subject: Subject, folder: string): Promise<Reference> {
	const plan = referencePlan(subject);
	const first = await trainReference(world, plan, subject);
	const gradients = first.values.gradient;
	const noise = await trainNoise(world, plan, subject, first);
	const tensors = [...first.values.updated].map(([name, updated]) => {
		const gradient = gradients.get(name) ?? new Float32Array(updated.length);
		return {
			name,
			elements: updated.length,
			rms: { gradient: rms(gradient), updated: rms(updated), stepped: rms(first.values.stepped.get(name)!) },
			noise: noise.changes.get(name) ?? 0,
		};
	});
	const reference: Reference = {
		microBatchSize: plan.microBatchSize,
		microbatches: plan.microbatches,
		scalars: scalarsOf(first.result),
		noise: noise.scalars,
		noiseFlips: noise.flips,
		recipe: subject.language.moe.recipe,
		operands: [...first.operands.keys()].map((name, at) => ({ name, noise: noise.operands[at] ?? 0 })),
		clamp: Number.isFinite(subject.language.mlp.clamp) ? subject.language.mlp.clamp : null,
		clipFactor: first.clipFactor,
		tensors,
	};
	const entries: TensorEntry[] = kinds.flatMap((kind) =>
		[...first.values[kind]].map(([name, data]) => entry(`${kind}.${name}`, "F32", data)),
	);
	for (const [pass, data] of first.routing.experts) entries.push(entry(`experts.${pass}`, "I32", data));
	for (const [pass, data] of first.routing.logits) entries.push(entry(`logits.${pass}`, "F32", data));
	for (const [name, data] of first.operands) entries.push(entry(`operand.${name}`, "F32", data));
	for (const [place, data] of first.clamped) entries.push(entry(`clamped.${place}`, "F64", data));
	writeSafetensors(join(folder, files.values), entries);
	writeFileSync(join(folder, files.description), JSON.stringify(reference));
	return reference;
}

function entry(
	name: string,
	dtype: "F32" | "F64" | "I32",
	data: Float32Array | Float64Array | Int32Array,
): TensorEntry {
	return { name, dtype, shape: [data.length], data: () => data };
}

/** A reference folder as a rank reads it. */
export class StoredReference implements Disposable {
	readonly description: Reference;
	readonly #file: SafetensorsFile;

	constructor(folder: string) {
		this.description = JSON.parse(readFileSync(join(folder, files.description), "utf8")) as Reference;
		this.#file = openSafetensors(join(folder, files.values));
	}

	/** A whole tensor, or null where the reference has no tensor of the kind. */
	values(kind: Kind, name: string): Float32Array | null {
		const key = `${kind}.${name}`;
		return this.#file.tensors.has(key) ? (this.#file.read(key) as Float32Array) : null;
	}

	routing(): RoutingTable {
		const table = new RoutingTable();
		for (const key of this.#file.tensors.keys()) {
			const [, what, pass] = /^(experts|logits)\.(\d+\.\d+)$/.exec(key) ?? [];
			if (what === "experts") table.experts.set(pass!, this.#file.read(key) as Int32Array);
			if (what === "logits") table.logits.set(pass!, this.#file.read(key) as Float32Array);
		}
		return table;
	}

	operands(): Operands {
		return new Map(this.#named("operand").map(([name, values]) => [name, values as Float32Array]));
	}

	clampCounts(): ClampCounts {
		return new Map(this.#named("clamped").map(([place, counts]) => [place, counts as Float64Array]));
	}

	/** Values by what follows their prefix, in the order in which they were written. */
	#named(prefix: string): [string, TensorArray][] {
		return [...this.#file.tensors.keys()]
			.filter((key) => key.startsWith(`${prefix}.`))
			.map((key) => [key.slice(prefix.length + 1), this.#file.read(key)]);
	}

	[Symbol.dispose](): void {
		this.#file[Symbol.dispose]();
	}
}

export function scalarsOf({ losses: all, tokens, gradientNorm, balancing }: StepResult): Scalars {
	const { [languageModelLoss]: loss, ...losses } = all;
	return { loss: loss!, losses, tokens, gradientNorm, balancing };
}

/** Root mean square of x, or of x − y. */
function rms(x: Float32Array, y?: Float32Array): number {
	let sum = 0;
	for (let i = 0; i < x.length; i++) sum += (x[i]! - (y?.[i] ?? 0)) ** 2;
	return Math.sqrt(sum / Math.max(1, x.length));
}

async function trainReference(world: World, plan: Plan, subject: Subject) {
	using engine = await openEngine(world, plan, subject, { order: plainOrder });
	engine.restart();
	const operands = new Map<string, Float32Array>();
	const clamps = new ClampMeter();
	const tokens = tokensOf(subject);
	engine.observe((model) => ({
		...(roundsExperts(subject) && recordOperands(model, tokens, operands)),
		...clamps.probe(model),
	}));
	let gradient = new Map<string, Float32Array>();
	const result = engine.step(() => {
		gradient = wholeTensors(engine, "gradient");
	});
	engine.observe(null);
	const routing = RoutingTable.of(engine.routing, tokens);
	const { clipFactor } = engine.state.scalars.read();
	for (let step = 1; step < realSteps; step++) engine.step();
	const stepped = wholeTensors(engine, "value");
	updateAlone(engine, subject, { gradientOf: (name) => gradient.get(name)!, clipFactor });
	const updated = wholeTensors(engine, "value");
	const values = { gradient, updated, stepped };
	return { result, routing, operands, clamped: clamps.counts, clipFactor, values };
}

/** Whether experts round operands to e4m3. */
function roundsExperts({ language }: Subject): boolean {
	return language.moe.recipe === "e4m3Blockwise";
}

/**
 * Step 1 once more, rounded otherwise, several times: the same microbatches, from the last to the first, and every weight
 * moved to a neighbour in fp32 or left. The order of microbatches alone shows only the roundings of sums over microbatches,
 * while tensor-parallel ranks round otherwise within a layer. A product with a moved weight changes by as much as by rounding.
 * Experts that round to e4m3 are given the reference's operands, as in layouts, and keep their weights, so that they round as the
 * reference does. Of the runs that decide as the reference where to route tokens and what to clamp, returns the scalars and each
 * gradient's and operand's largest change (root mean square); of the others, the number of decisions that they flip.
 */
async function trainNoise(
	world: World,
	plan: Plan,
	subject: Subject,
	first: Awaited<ReturnType<typeof trainReference>>,
) {
	using engine = await openEngine(world, plan, subject, { order: plainOrder, reversed: true });
	const scalars: Scalars[] = [];
	const changes = new Map<string, number>();
	const operands = [...first.operands].map(() => 0);
	let flips = 0;
	for (let run = 0; run < noiseRuns; run++) {
		engine.restart();
		moveByRounding(engine, subject.seed + run, (name) => !(roundsExperts(subject) && name.includes(".mlp.experts.")));
		const replay = roundsExperts(subject) ? new OperandReplay(first.operands) : null;
		const clamps = new ClampMeter();
		engine.observe((model) => ({ ...replay?.probe(model), ...clamps.probe(model) }));
		let gradients = new Map<string, Float32Array>();
		const result = engine.step(() => {
			gradients = wholeTensors(engine, "gradient");
		});
		const clamped = clamps.flips(first.clamped, engine.world, world.device).count;
		const flipped = first.routing.flips(engine.routing, 0).length + clamped;
		flips += flipped;
		if (flipped > 0) continue;
		scalars.push(scalarsOf(result));
		const errors = replay?.result(engine.world, world.device).errors ?? [];
		for (const [at, error] of errors.entries()) operands[at] = Math.max(operands[at]!, error);
		for (const [name, gradient] of gradients) {
			const change = rms(first.values.gradient.get(name)!, gradient);
			changes.set(name, Math.max(changes.get(name) ?? 0, change));
		}
	}
	return { scalars, changes, operands, flips };
}

/**
 * Multiplies every weight by 1 − 2^-24, 1 or 1 + 2^-24, drawn from `seed`. A float32 weight w is between 2^23 and 2^24 units
 * in its last place, so it moves to a neighbour or stays; a factor of 2^-23 would move weights by two units. `moves`: which tensors.
 */
function moveByRounding(engine: Engine, seed: number, moves: (name: string) => boolean): void {
	const next = numbersFrom(seed);
	for (const { name, value, gradient } of engine.tensors()) {
		if (moves(name)) {
			const moved = value.toFloat32().map((weight) => weight * (1 + (Math.floor(3 * next()) - 1) * 2 ** -24));
			using tensor = Tensor.from(value.device, moved, value.shape);
			copyInto(tensor, value);
		}
		value[Symbol.dispose]();
		gradient?.[Symbol.dispose]();
	}
}

function tokensOf({ samples, sequenceLength }: Subject): number {
	return samples.length * sequenceLength;
}

/** Whole tensors of a process that holds the whole model; gradients of the trainable tensors only. */
function wholeTensors(engine: Engine, what: "value" | "gradient"): Map<string, Float32Array> {
	const whole = new Map<string, Float32Array>();
	for (const tensor of engine.tensors()) {
		const { name, shape, blocks } = tensor;
		const part = tensor[what];
		if (part) {
			const full = new Float32Array(elementCount(shape));
			copyBlocks(part.toFloat32(), part.width, full, elementCount(shape.slice(1)), blocks, "to full");
			whole.set(name, full);
		}
		tensor.value[Symbol.dispose]();
		tensor.gradient?.[Symbol.dispose]();
	}
	return whole;
}

// The optimizer on its own: given gradients in, updated weights out. Judged apart from a real step, because Adam turns
// the rounding noise of a gradient that is zero into a full step.

/**
 * Starts again from the initial weights and makes one update from gradients given by name (whole tensors, before
 * clipping). `clipFactor`: factor of every gradient.
 */
export function updateAlone(
	engine: Engine,
	subject: Subject,
	given: { readonly gradientOf: (name: string) => Float32Array; readonly clipFactor: number },
): void {
	engine.restart();
	const { replicas, optimizer, scalars } = engine.state;
	for (const { parameters } of replicas) parameters.zeroGradients();
	for (const { name, shape, value, gradient, blocks } of engine.tensors()) {
		if (gradient) {
			const local = new Float32Array(gradient.elements);
			const width = elementCount(shape.slice(1));
			copyBlocks(local, gradient.width, given.gradientOf(name), width, blocks, "to local");
			using own = Tensor.from(gradient.device, local, gradient.shape);
			copyInto(own, gradient);
			gradient[Symbol.dispose]();
		}
		value[Symbol.dispose]();
	}
	scalars.set("foundInf", 0);
	scalars.set("clipFactor", given.clipFactor);
	scalars.set("learningRate", subject.learningRate);
	scalars.set("weightDecay", subject.weightDecay);
	optimizer.step();
	for (const replica of replicas) replica.gather();
}
