/**
 * The router of an elastic model on one rank: samples of a step's microbatches, their masks on the device, and the way back
 * from the masks' gradients to the router's weights (docs/spec/elastic.md §3, §9, §13). Every rank draws the same samples and
 * has the gradients of its own part of the model; their sum over the module's ranks is the gradient.
 */
import type { HybridModel } from "../../../models/language/model.ts";
import { ModuleParameters } from "../../../models/module-parameters.ts";
import { FactorSources, Tensor } from "../../../tensor/index.ts";
import type { Variant, Variants } from "../../guest.ts";
import { type AxisName, rowsOf } from "../axes.ts";
import type { ElasticConfig } from "../config.ts";
import { MaskBuilder } from "../masks/masks.ts";
import { FactorLayout, type PartPlace } from "../masks/rings.ts";
import { TableLayout } from "../masks/tables.ts";
import { type BudgetLoss, budgetLoss, parentBudget } from "./budget-loss.ts";
import {
	addAxisGradient,
	type Draw,
	type GateWeights,
	gateName,
	labelOf,
	type RouterSample,
	routerParameters,
	sampleAxis,
} from "./network.ts";

/** A microbatch's sample, the masks and the loss that follow from it. */
export interface Sampled extends Variant {
	readonly draw: Draw;
	readonly sample: RouterSample;
	readonly loss: BudgetLoss;
}

type Weights = ReadonlyMap<AxisName, GateWeights>;

/** Samples of several microbatches and the memory of their masks. */
class SampledStep implements Variants {
	constructor(
		readonly microbatches: readonly Sampled[],
		/** The router's, from which they were drawn. */
		readonly weights: Weights,
		/** The tables' values [microbatches, values]. */
		readonly values: Float32Array,
		/** Of every factor, f32 [microbatches, factors]; null: not wanted. */
		readonly gradients: Tensor | null,
		/** Memory that the masks read. */
		private readonly memory: readonly Tensor[],
	) {}

	[Symbol.dispose](): void {
		for (const owned of [...this.memory, this.gradients]) owned?.[Symbol.dispose]();
	}
}

export class ElasticRouter implements Disposable {
	readonly #parameters: ModuleParameters;
	readonly #layout: FactorLayout;
	readonly #sources: FactorSources;
	readonly tables: TableLayout;
	/** The parent's own budget: 1, or GB. */
	readonly parentBudget: number;

	constructor(
		readonly config: ElasticConfig,
		readonly model: HybridModel,
		/** Ranks over which gradients are summed. */
		replicas = 1,
	) {
		const whole = { rank: 0, size: 1 };
		this.#parameters = new ModuleParameters(
			model.device,
			routerParameters(config),
			{ tensor: whole, expertTensor: whole, expert: whole },
			{ dtype: "f32", frozen: () => config.router.frozen, replicas: { dense: replicas, expert: replicas } },
		);
		this.tables = new TableLayout(config, model.config);
		this.#layout = new FactorLayout(config.axes, this.tables, model, config);
		this.#sources = new FactorSources(model.device, this.#layout.sources, this.tables.size);
		this.parentBudget = parentBudget(config, model.config);
	}

	get parameters() {
		return this.#parameters.set;
	}

	initialise(seed: number): void {
		this.#parameters.initialise(seed);
	}

	logicalTensors() {
		return this.#parameters.logicalTensors();
	}

	/** The weights as they are now; waits for the device. */
	weights(): Weights {
		const read = (name: string) => Float64Array.from(this.parameters.get(name).value.toFloat32());
		return new Map(
			this.config.axes.map((axis) => [axis.name, { first: read(gateName(axis, 0)), second: read(gateName(axis, 2)) }]),
		);
	}

	/** Samples and masks of microbatches; `trains`: their gradients are wanted. Waits for the device. */
	sample(draws: readonly Draw[], iteration: number, { trains }: { readonly trains: boolean }): SampledStep {
		const { config, tables, model } = this;
		const { device } = model;
		const weights = this.weights();
		const samples = draws.map(
			(draw): RouterSample =>
				new Map(
					config.axes.map((axis) => [axis.name, sampleAxis(config, axis, weights.get(axis.name)!, iteration, draw)]),
				),
		);
		const host = new Float32Array(draws.length * tables.size);
		for (const [at, sample] of samples.entries())
			tables.values(sample, host.subarray(at * tables.size, (at + 1) * tables.size));
		const values = Tensor.from(device, host, [draws.length, tables.size]);
		const factors = this.#sources.spread(values);
		const wanted = trains && !config.router.frozen;
		const gradients = wanted ? Tensor.zeros(device, factors.shape, "f32", "gradient") : null;
		const memory = [values, factors];
		const layout = this.#layout;
		const microbatches = samples.map((sample, at) => {
			const window = (whole: Tensor, offset: number, width: number) => {
				using row = whole.rowsFrom(at, 1);
				const own = row.columns(offset, width);
				memory.push(own);
				return own;
			};
			const ofPart = (whole: Tensor, { offset, width }: PartPlace) => window(whole, offset, width);
			const builder = new MaskBuilder(
				{ config, model, tables, layout, sample },
				{
					columns: (place) => ({ factors: ofPart(factors, place), gradients: gradients && ofPart(gradients, place) }),
					scale: (place) => ({
						value: window(values, place.table.offset, 1),
						gradients: gradients && ofPart(gradients, place),
					}),
				},
			);
			const draw = draws[at]!;
			const { value, parent } = draw.budget;
			const loss = budgetLoss(config, model.config, draw.budget, sample);
			return { draw, sample, masks: builder.masks(), loss, label: labelOf(value), whole: parent };
		});
		return new SampledStep(microbatches, weights, host, gradients, memory);
	}

	/**
	 * Adds to the weights' gradients what this rank has of a step's, from its masks and from the budget loss of every
	 * microbatch times `lossWeights`. Waits for the device.
	 */
	addGradients({ microbatches, weights, values, gradients }: SampledStep, lossWeights: readonly number[]): void {
		if (gradients === null) return;
		const { config, tables } = this;
		using ofValues = this.#sources.gather(gradients);
		const dvalues = ofValues.toFloat32();
		const sums = new Map(
			config.axes.map(({ name }) => {
				const { first, second } = weights.get(name)!;
				return [name, { first: new Float64Array(first.length), second: new Float64Array(second.length) }];
			}),
		);
		for (const [at, { sample, loss }] of microbatches.entries()) {
			const dprobabilities = new Map(
				config.axes.map((axis) => [axis.name, new Float64Array(rowsOf(axis) * axis.sizes.length)]),
			);
			const own = (all: Float32Array) => all.subarray(at * tables.size, (at + 1) * tables.size);
			tables.addGradients(sample, own(values), own(dvalues), dprobabilities);
			for (const [name, one] of sample) {
				const d = dprobabilities.get(name)!;
				const ofLoss = loss.gradient.get(name)!;
				for (let k = 0; k < d.length; k++) d[k]! += lossWeights[at]! * ofLoss[k]!;
				addAxisGradient(one, weights.get(name)!, d, sums.get(name)!);
			}
		}
		for (const axis of config.axes) {
			const { first, second } = sums.get(axis.name)!;
			this.#put(gateName(axis, 0), first);
			this.#put(gateName(axis, 2), second);
		}
	}

	#put(name: string, sum: Float64Array): void {
		const gradient = this.parameters.get(name).mainGradient!;
		gradient.device.copyToDevice(gradient, Float32Array.from(sum));
	}

	[Symbol.dispose](): void {
		this.#sources[Symbol.dispose]();
		this.#parameters[Symbol.dispose]();
	}
}
