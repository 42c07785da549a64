/**
 * Trains an elastic model as an elastic-* reference folder did, with its budgets and its router's noise, and compares: every
 * microbatch's choices, probabilities, expected sizes and losses, every step's gradient norms, and the losses of submodels.
 * Tolerances are those of the references' README.
 */
import { join } from "node:path";
import {
	type Correspondence,
	CorrespondenceBuilder,
	loadModel,
	MappedStore,
	openSafetensors,
	planTensors,
	type TensorStore,
} from "../../checkpoint/index.ts";
import { type ImageTextMicrobatch, withoutImages } from "../../data/microbatch.ts";
import type { AxisName } from "../../guests/elastic/axes.ts";
import { countParameters, type Sizes } from "../../guests/elastic/counts.ts";
import { elastic, routerIn } from "../../guests/elastic/elastic.ts";
import { type Draw, routerPrefix } from "../../guests/elastic/router/network.ts";
import type { Sampled } from "../../guests/elastic/router/router.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { languageModelPrefix } from "../../models/language/layer-numbering.ts";
import { gradientSquares, sumSquares } from "../../optim/gradient-norm.ts";
import { languageAlone, namedTopology } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import type { Run } from "../../train/assemble.ts";
import { Losses, languageModelLoss, meansOf } from "../../train/losses.ts";
import type { MicrobatchObserver } from "../../train/rank-passes.ts";
import { bandLimit, type Check, relative } from "../comparison.ts";
import { lossMeanOfReference } from "../golden-fields.ts";
import { LanguageProbes, watchedStep } from "../language/probes.ts";
import { requireCuts } from "../layout-cuts.ts";
import { reduceHost } from "../probe-sums.ts";
import { checksOfStep, languageRun, type ReferenceFormat, type StepWatch } from "../reference.ts";
import { MicrobatchLosses, readTokenBatches, tokensOfMicrobatches } from "../token-batches.ts";
import { planOf } from "../verify/samples.ts";
import { type ElasticConfigFile, type ElasticGolden, elasticConfig, elasticFormat, elasticModel } from "./golden.ts";

/** Largest difference of a probability. */
const probabilityLimit = 1e-5;
const limitOf = (least: number, band: number) => Math.max(least, 3 * band);

/** elastic-* folders, an elastic model trained by Megatron-LM. */
export const elasticReference: ReferenceFormat = {
	...{ hasEncoder: false, ownWeights: "a reference of an elastic model", fp32Alone: "a reference of an elastic model" },
	holds: (path) => elasticFormat.holds(path),
	layout: () => "1",
	plan: (layout, path) => {
		const { config } = elasticFormat.read(path);
		requireCuts(layout, elasticModel(config, "f32"), null);
		const { batch, microbatches, seq } = config;
		const plan = planOf(layout, { samples: batch * microbatches, microBatchSize: batch, sequenceLength: seq });
		const { expert, expertTensor, tensor } = layout.topology.language.shape;
		if (expert * expertTensor > tensor && layout.topology.language.lanes > 1) {
			throw new UserError(
				`Layout ${layout.name}: lanes would share experts, and the microbatches of ${path} draw sizes of their own.`,
			);
		}
		if (plan.microBatchSize === batch) return plan;
		throw new UserError(
			`Layout ${layout.name} needs microbatches of ${plan.microBatchSize} samples; ${path} draws budgets for ${batch}.`,
		);
	},
	open: (path, { layout, rank, plan }) => {
		const { config: file, golden } = elasticFormat.read(path);
		const model = elasticModel(file, "f32");
		using opened = new DisposableStack();
		const weights = opened.use(openSafetensors(join(path, "model.safetensors")));
		const names = megatronNames(weights, path);
		const { language } = layout.topology;
		const lane = language.coordinates(rank).dp;
		const excluded = new Set(golden.optimizer.no_weight_decay);
		const batches = readTokenBatches(path, file, golden.steps.length);
		const stepOne = { batch: file.batch, seq: file.seq, values: new Map(), gradNorm: golden.step1_grad_norm, names };
		const run = languageRun(model, golden.optimizer);
		const kept = opened.move();
		return {
			specification: {
				...run,
				guests: [
					elastic({
						config: elasticConfig(file, model),
						draw: (iteration, microbatch) => drawOf(golden, iteration, lane * plan.microbatches + microbatch),
					}),
				],
				lossMean: lossMeanOfReference(file.transformer_config),
				adam: { ...run.adam, weightDecayMultiplier: (name) => (excluded.has(foreignName(name)) ? 0 : 1) },
			},
			optimizer: golden.optimizer,
			steps: batches.length,
			batch: (step) => batches[step]!,
			load: (run, partial) => loadModel(run, new MappedStore(weights, planTensors(weights, names, "logical")), partial),
			before: (run) => (language.lanes === 1 ? submodelChecks(run, file, golden, batches[0]!, names) : []),
			watch: (run, index, microbatches) => {
				const own = {
					losses: new MicrobatchLosses(run, plan, file, microbatches),
					tokens: tokensOfMicrobatches(batches[index]!, file),
				};
				return watchedStep(stepOne, plan, run, index, new ElasticWatch(run, golden, index, own));
			},
			[Symbol.dispose]: () => kept.dispose(),
		};
	},
};

/** Budget, one-hot sample and noise that the reference had. */
function drawOf(golden: ElasticGolden, iteration: number, microbatch: number): Draw {
	const { budget, hard, axes } = golden.steps[iteration]!.microbatches[microbatch]!;
	return {
		budget: { value: budget, parent: budget === 1 },
		hard,
		noise: ({ name }) => Float64Array.from(axes[name]!.gumbel.flat()),
	};
}

/** Draws and losses of a step's microbatches, as they are compared. */
class ElasticWatch implements StepWatch {
	readonly #expected: ElasticGolden["steps"][number];
	readonly #sampled: readonly Sampled[];
	#routerNorm = Number.NaN;
	#modelNorm = Number.NaN;

	constructor(
		readonly run: Run,
		golden: ElasticGolden,
		readonly index: number,
		private readonly own: { readonly losses: MicrobatchLosses; readonly tokens: readonly number[] },
	) {
		this.#expected = golden.steps[index]!;
		const draws = this.#expected.microbatches.map((_, microbatch) => drawOf(golden, index, microbatch));
		using sampled = routerIn(run.guests)!.sample(draws, index, { trains: false });
		this.#sampled = sampled.microbatches;
	}

	readonly forward: MicrobatchObserver = (...value) => this.own.losses.observe(...value);

	readonly gradients = (): void => {
		const { replicas, scalars, world } = this.run.state;
		const own = routerIn(this.run.guests)!.parameters;
		// Not from the norm of both: the router's part may be nearly all of it.
		const ofModel = replicas.filter(({ parameters }) => parameters !== own);
		const sum = Float64Array.of(gradientSquares(ofModel, scalars));
		sumSquares(replicas, scalars);
		reduceHost(world, scalars.device, sum, "sum");
		this.#modelNorm = Math.sqrt(sum[0]!);
		let squares = 0;
		for (const { mainGradient } of own) squares += mainGradient!.toFloat32().reduce((sum, x) => sum + x * x, 0);
		this.#routerNorm = Math.sqrt(squares);
	};

	checks({ gradientNorm }: { readonly gradientNorm: number }): Check[] {
		const { guests, language } = this.run;
		const losses = this.own.losses.means(this.own.tokens);
		const expected = this.#expected;
		const step = `step ${this.index + 1}`;
		const check = checksOfStep(this.index);
		const { config } = routerIn(guests)!;
		const checks: Check[] = [];
		for (const [at, wanted] of expected.microbatches.entries()) {
			const which = `microbatch ${at + 1}`;
			const { sample, loss: budget } = this.#sampled[at]!;
			for (const [name, { probabilities, chosen, axis }] of sample) {
				const golden = wanted.axes[name]!;
				const sizes = chosen.map((choice) => axis.sizes[choice]!);
				const wrong = [golden.chosen].flat().filter((size, row) => size !== sizes[row]).length;
				const p = golden.p.flat();
				const off = Math.max(...p.map((value, k) => Math.abs(value - probabilities[k]!)));
				checks.push(
					{ name: `${step} ${name} choices, ${which}`, expected: 0, actual: wrong, error: wrong, limit: 0 },
					{
						name: `${step} ${name} probabilities, ${which}`,
						expected: 0,
						actual: off,
						error: off,
						limit: probabilityLimit,
					},
					...[golden.expected].flat().map((mean, row) => {
						const own = axis.sizes.reduce(
							(sum, size, k) => sum + size * probabilities[row * axis.sizes.length + k]!,
							0,
						);
						return check(`${name} expected size, ${which}`, mean, own, probabilityLimit);
					}),
				);
			}
			const parameters = countsOf(language!.config, budget.expected);
			const limit = limitOf(2e-6, expected.expected_parameters_band);
			checks.push(
				check(`expected parameters, ${which}`, wanted.expected_parameters[0], parameters.total, limit),
				check(`expected active parameters, ${which}`, wanted.expected_parameters[1], parameters.active, limit),
				check(`budget loss, ${which}`, wanted.budget_loss, budget.value, limitOf(2e-5, expected.budget_loss_band)),
				check(`lm loss, ${which}`, wanted.lm_loss, losses[at]!, bandLimit("loss", expected.loss_band)),
				check(
					`total loss, ${which}`,
					wanted.lm_loss + config.lossWeight * wanted.budget_loss,
					losses[at]! + config.lossWeight * budget.value,
					limitOf(2e-5, expected.budget_loss_band),
				),
			);
		}
		const routerNorm = this.#routerNorm;
		const norm = (band: number) => bandLimit("grad_norm", band);
		const loss = losses.reduce((sum, own) => sum + own / losses.length, 0);
		checks.push(
			check("loss", expected.loss, loss, bandLimit("loss", expected.loss_band)),
			check("router gradient norm", expected.router_grad_norm, routerNorm, norm(expected.router_grad_norm_band)),
			check("model gradient norm", expected.model_grad_norm, this.#modelNorm, norm(expected.model_grad_norm_band)),
			check("gradient norm", expected.grad_norm, gradientNorm, norm(expected.grad_norm_band)),
		);
		return checks;
	}
}

/** Megatron's counts. */
function countsOf(model: HybridConfig, sizes: Sizes): { readonly total: number; readonly active: number } {
	const of = (target: "total" | "active") => countParameters(model, sizes, target, "megatron").value;
	return { total: of("total"), active: of("active") };
}

/** Losses and logits of the reference's submodels, on its first microbatch. */
function submodelChecks(
	run: Run,
	{ batch, seq }: ElasticConfigFile,
	golden: ElasticGolden,
	samples: readonly ImageTextMicrobatch[],
	names: Correspondence,
): Check[] {
	const microbatch = joined(samples.slice(0, batch));
	const { state } = run;
	const plan = {
		...planOf(namedTopology(languageAlone), { samples: batch, microBatchSize: batch, sequenceLength: seq }),
	};
	return golden.submodels.flatMap(({ sizes, loss, logits }, index) => {
		const draw: Draw = {
			budget: { value: 1, parent: true },
			hard: true,
			noise: (axis) => forced(axis.name, sizes, axis),
		};
		using sampled = routerIn(run.guests)!.sample([draw], 0, { trains: false });
		using losses = new Losses(state.scalars.device, state.lossOwner);
		const values = new Map([["logits", [logits]]]);
		const probes = new LanguageProbes(
			{ batch, seq, values, gradNorm: {}, names },
			{ ...plan, topology: run.topology },
			run,
		);
		state.passes.evaluate([microbatch], losses, probes.observe, sampled.microbatches);
		const actual = meansOf(losses.totals(state.world))[languageModelLoss]!;
		const limit = limitOf(2e-6, golden.submodel_loss_band);
		const name = `submodel ${index + 1}`;
		return [
			{ name: `${name} loss`, expected: loss, actual, error: relative(actual, loss), limit },
			...probes.checks().map((check) => ({ ...check, name: `${name} ${check.name.replace(/^step 1 /, "")}` })),
		];
	});
}

/** Noise that leaves one choice. */
function forced(
	name: AxisName,
	sizes: Readonly<Record<string, number | readonly number[]>>,
	axis: { readonly sizes: readonly number[]; readonly layers: readonly number[] | null },
): Float64Array {
	const wanted = [sizes[name]!].flat();
	const rows = axis.layers?.length ?? 1;
	return Float64Array.from({ length: rows * axis.sizes.length }, (_, at) => {
		const row = Math.floor(at / axis.sizes.length);
		return axis.sizes[at % axis.sizes.length] === (wanted[row] ?? wanted[0]) ? 1e6 : 0;
	});
}

function foreignName(name: string): string {
	return name.startsWith(routerPrefix)
		? `router_pp0.${name.slice(routerPrefix.length)}`
		: name.slice(languageModelPrefix.length);
}

/** Megatron's names are those of this program without its prefix; the router's begin with its pipeline stage. */
function megatronNames(weights: TensorStore, path: string): Correspondence {
	const builder = new CorrespondenceBuilder(path);
	for (const [name, { shape }] of weights.tensors) {
		const own = name.startsWith("router_pp0.")
			? routerPrefix + name.slice("router_pp0.".length)
			: languageModelPrefix + name;
		builder.same(own, name, shape);
	}
	return builder;
}

/** Samples as one microbatch. */
function joined(samples: readonly ImageTextMicrobatch[]): ImageTextMicrobatch {
	const texts = samples.map(({ text }) => text);
	return withoutImages({
		ids: Int32Array.from(texts.flatMap(({ ids }) => [...ids])),
		labels: Int32Array.from(texts.flatMap(({ labels }) => [...labels])),
		lossMask: Float32Array.from(texts.flatMap(({ lossMask }) => [...lossMask])),
		lengths: texts.flatMap(({ lengths }) => [...lengths]),
	});
}
