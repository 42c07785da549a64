/**
 * The router of an elastic model on one rank: samples of a step's microbatches, their masks on the device, and the way back
 * from the masks' gradients to the router's weights (docs/spec/elastic.md §3, §9, §13). Every rank draws the same samples and
 * has the gradients of its own part of the model; their sum over the module's ranks is the gradient.
 */
import type { ModelMasks } from "../models/hybrid/masks.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import { ModuleParameters } from "../models/module-parameters.ts";
import { Tensor } from "../tensor/tensor.ts";
import { type AxisName, rowsOf } from "./axes.ts";
import { type BudgetLoss, budgetLoss, parentBudget } from "./budget-loss.ts";
import type { ElasticConfig } from "./config.ts";
import { MaskBuilder } from "./masks.ts";
import { DeviceRings } from "./rings.ts";
import { addAxisGradient, type Draw, type GateWeights, type RouterSample, sampleAxis } from "./router-network.ts";
import { gateName, routerParameters } from "./router-parameters.ts";
import { TableLayout } from "./tables.ts";

/** A microbatch's sample and what follows from it. */
export interface Sampled {
	readonly draw: Draw;
	readonly sample: RouterSample;
	readonly masks: ModelMasks;
	readonly loss: BudgetLoss;
}

/** Samples of several microbatches and the memory of their masks. */
export class SampledStep implements Disposable {
	constructor(
		readonly microbatches: readonly Sampled[],
		/** f32 [microbatches, factors], and the gradients. */
		readonly values: Tensor,
		readonly gradients: Tensor | null,
		/** Windows into both, which the masks read. */
		private readonly windows: readonly Tensor[],
	) {}

	[Symbol.dispose](): void {
		for (const owned of [...this.windows, this.values, this.gradients]) owned?.[Symbol.dispose]();
	}
}

export class ElasticRouter implements Disposable {
	readonly #parameters: ModuleParameters;
	readonly #rings: DeviceRings;
	readonly tables: TableLayout;
	/** The parent's own budget: 1, or GB. */
	readonly parentBudget: number;

	constructor(
		readonly config: ElasticConfig,
		readonly model: HybridModel,
	) {
		const whole = { rank: 0, size: 1 };
		this.#parameters = new ModuleParameters(
			model.device,
			routerParameters(config),
			{ tensor: whole, expertTensor: whole, expert: whole },
			{ dtype: "f32", frozen: () => config.router.frozen },
		);
		this.#rings = new DeviceRings(config.axes, model, config);
		this.tables = new TableLayout(config, model.config);
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
	weights(): ReadonlyMap<AxisName, GateWeights> {
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
		const wanted = trains && !config.router.frozen;
		const gradients = wanted ? Tensor.zeros(device, [draws.length, tables.size], "f32", "gradient") : null;
		const windows: Tensor[] = [];
		const microbatches = samples.map((sample, at) => {
			const builder = new MaskBuilder({ config, model, tables, rings: this.#rings, sample }, (table) => {
				const count = table.coefficients.length;
				const window = (whole: Tensor) => {
					using row = whole.rowsFrom(at, 1);
					const own = row.columns(table.offset, count);
					windows.push(own);
					return own;
				};
				return { values: window(values), gradients: gradients && window(gradients) };
			});
			const draw = draws[at]!;
			return { draw, sample, masks: builder.masks(), loss: budgetLoss(config, model.config, draw.budget, sample) };
		});
		return new SampledStep(microbatches, values, gradients, windows);
	}

	/**
	 * Adds to the weights' gradients what this rank has of a step's, from its masks and from the budget loss of every
	 * microbatch times `lossWeights`. Waits for the device.
	 */
	addGradients({ microbatches, values, gradients }: SampledStep, lossWeights: readonly number[]): void {
		if (gradients === null) return;
		const { config, tables } = this;
		const weights = this.weights();
		const [factors, dfactors] = [values.toFloat32(), gradients.toFloat32()];
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
			tables.addGradients(sample, own(factors), own(dfactors), dprobabilities);
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
		this.#rings[Symbol.dispose]();
		this.#parameters[Symbol.dispose]();
	}
}
