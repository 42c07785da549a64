/**
 * A mixture-of-experts layer (docs/spec/language-model.md §4): x_TH → routed experts + shared expert of rms(x_TH), without the
 * residual. Routing weights multiply the activation before fc2, so combining is a plain sum. Each rank routes its own tokens;
 * under expert parallelism a token dispatcher sends their rows to the experts.
 */
import { hasGatedActivation } from "../../../config/derive.ts";
import type { TrainingConfiguration } from "../../../config/schema.ts";
import type { ExpertParallel } from "../../../parallel/index.ts";
import {
	cast,
	ExpertOrder,
	type FloatDtype,
	linear,
	maskScores,
	type ResidualSum,
	type Routing,
	route,
	sinkhornOffsets,
	type Tape,
	type Tensor,
} from "../../../tensor/index.ts";
import { philoxKey } from "../../initialise.ts";
import type { ParameterSpec } from "../../parameter-spec.ts";
import { addBalancingLosses } from "../balancing-losses.ts";
import type { HybridConfig } from "../config.ts";
import { expertMlp, rowsInE4m3 } from "../expert-mlp.ts";
import { drawLogits } from "../force-load-balancing.ts";
import type { LayerContext } from "../layer-context.ts";
import { addMasked, masked } from "../masks.ts";
import { exhaust, type Nodes } from "../nodes.ts";
import { biasOf } from "../projection.ts";
import { isRecomputed, normed, runModule } from "../recomputed-module.ts";
import type { RouterState } from "../router-state.ts";
import { SharedExpert, sharedExpertGate } from "../shared-expert.ts";
import { AllGatherDispatcher } from "../token-dispatcher/all-gather.ts";
import { AllToAllDispatcher } from "../token-dispatcher/all-to-all.ts";
import type { TokenDispatcher } from "../token-dispatcher/dispatcher.ts";
import { HierarchicalDispatcher } from "../token-dispatcher/hierarchical.ts";
import { LocalDispatcher } from "../token-dispatcher/local.ts";
import { biases, distributions, hiddenNorm, type Kind, replicated } from "./kind.ts";
import { feedForwardFlops, feedForwardParameters } from "./mlp.ts";

export const moe: Kind = {
	title: "mixture of experts",
	scopes: ["mlp", "pre_mlp_layernorm"],
	routes: true,
	parameters,
	forward,
	flops,
	megatronFlops,
	ownSizes: ({ numExperts, moeFfnHiddenSize }) => ({ moe: { experts: numExperts, ffnHiddenSize: moeFfnHiddenSize } }),
};

function parameters(config: HybridConfig): ParameterSpec[] {
	const { hiddenSize: h, moe } = config;
	const { inward } = distributions(config);
	const specs: ParameterSpec[] = [
		...hiddenNorm(config, "pre_mlp_layernorm.weight"),
		{
			name: "mlp.router.weight",
			shape: [moe.experts, h],
			initialisation: inward,
			shard: replicated,
		},
		// Megatron initialises the router's bias as a weight.
		...biases(config, "mlp.router.bias", moe.experts, replicated).map((spec) => ({ ...spec, initialisation: inward })),
		...latentParameters(config),
		...feedForwardParameters(
			{ ...config, hiddenSize: moe.latentSize ?? h },
			"mlp.experts.",
			moe.ffnHiddenSize,
			moe.interleave,
		).map((spec) => ({
			...spec,
			experts: moe.experts,
		})),
	];
	if (moe.sharedExpertSize > 0) {
		specs.push(...feedForwardParameters(config, "mlp.shared_experts.", moe.sharedExpertSize));
		if (moe.sharedExpertGate) {
			specs.push({ name: sharedExpertGate, shape: [1, h], initialisation: inward, shard: replicated });
		}
	}
	return specs;
}

const [toLatent, fromLatent] = ["mlp.fc1_latent_proj.weight", "mlp.fc2_latent_proj.weight"];

/** The projections before and behind experts of another width than the hidden states, whole on every rank. */
function latentParameters(config: HybridConfig): ParameterSpec[] {
	const { hiddenSize: h, moe } = config;
	if (moe.latentSize === null) return [];
	const { inward, outward } = distributions(config);
	return [
		{ name: toLatent, shape: [moe.latentSize, h], initialisation: inward, shard: replicated },
		...biases(config, toLatent.replace(/weight$/, "bias"), moe.latentSize, replicated),
		{ name: fromLatent, shape: [h, moe.latentSize], initialisation: outward, shard: replicated },
		...biases(config, fromLatent.replace(/weight$/, "bias"), h, replicated),
	];
}

/** x_TI of this rank's tokens through a latent projection; without one, x. */
function latent(tape: Tape, context: LayerContext, x: Tensor, name: string): Tensor {
	if (context.config.moe.latentSize === null) return x.share();
	return linear(tape, x, context.weights(name), biasOf(context, name));
}

/** Runs the layer, yielding while rows are in flight: three nodes, or one if this rank holds all experts. */
function* forward(tape: Tape, context: LayerContext, x: ResidualSum): Nodes<Tensor> {
	const { config } = context;
	const router = context.router!;
	using u = normed(tape, context, x, "pre_mlp_layernorm.weight");
	if (!isRecomputed(tape, config, "moe")) return yield* mixExperts(tape, context, router, u.y, () => u.drop());
	using mixed = runModule(tape, config, "moe", [u.y], (on, value) =>
		exhaust(mixExperts(on, context, router, value, () => {})),
	);
	u.drop();
	return mixed.y.share();
}

/** Routed experts + shared expert of u_TH. `read` is called when everything that reads u has been recorded. */
function* mixExperts(
	tape: Tape,
	context: LayerContext,
	router: RouterState,
	u: Tensor,
	read: () => void,
): Nodes<Tensor> {
	const { config } = context;
	const experts = expertParallelOf(context);
	using routing = routeTokens(tape, context, router, u);
	context.probe("routing")?.(routing.probabilities);
	const hidden = context.masks?.hidden;
	using kept = masked(tape, u, hidden);
	using entering = latent(tape, context, kept, toLatent);
	using dispatcher = dispatcherOf(tape, context, entering, routing, experts, router);
	// The shared expert's first half hides the dispatch, its second half the combine.
	using shared = config.moe.sharedExpertSize > 0 ? new SharedExpert(tape, context, u) : null;
	read();
	if (experts) yield* nextNode(tape, "experts");
	{
		using arrived = dispatcher.finishDispatch();
		using outputs = expertMlp(tape, context, arrived);
		dispatcher.startCombine(outputs);
		shared?.finish();
	}
	if (experts) yield* nextNode(tape, "combine");
	using combined = dispatcher.finishCombine();
	using summed = probeGradient(tape, combined, context.probe("routedGradient"));
	using routed = latent(tape, context, summed, fromLatent);
	return shared ? addMasked(tape, shared.y, routed, hidden) : masked(tape, routed, hidden);
}

/** x, whose gradient passes `probe` as a copy. */
function probeGradient(tape: Tape, x: Tensor, probe: ((gradient: Tensor) => void) | null): Tensor {
	if (probe === null) return x.share();
	const y = tape.output(x.share(), x.gradient !== null);
	tape.record({
		name: "probe gradient",
		outputs: [y],
		backward: ([dy]) => {
			const own = cast(dy!, x.dtype as FloatDtype);
			probe(own);
			x.gradient!.accumulate(own);
		},
	});
	return y;
}

/** Creates the configured token dispatcher, which starts the dispatch. */
function dispatcherOf(
	tape: Tape,
	context: LayerContext,
	u: Tensor,
	routing: Routing,
	parallel: ExpertParallel | null,
	{ overflow }: RouterState,
): TokenDispatcher {
	const inE4m3 = rowsInE4m3(context);
	const byExpert = () => ExpertOrder.of(tape.device, routing.expertIndex, context.config.moe.experts);
	if (parallel === null) return new LocalDispatcher(tape, u, routing, byExpert(), inE4m3);
	const { dispatcher } = parallel;
	if (dispatcher === "alltoall") return new AllToAllDispatcher(tape, u, routing, byExpert(), parallel, overflow);
	if (dispatcher === "allgather") return new AllGatherDispatcher(tape, u, routing, parallel, inE4m3);
	return new HierarchicalDispatcher(tape, u, routing, { ...parallel, nodes: dispatcher }, overflow, inE4m3);
}

/** The dispatch group, with this layer's number of experts a rank. */
function expertParallelOf({ config, parallel: { experts } }: LayerContext): ExpertParallel | null {
	return experts && { ...experts, localExperts: (config.moe.experts * experts.expertTensor) / experts.group.size };
}

/** Yields, and begins a tape segment, so that the next node can go backward on its own. */
function* nextNode(tape: Tape, name: string): Nodes<void> {
	const layer = tape.segments.at(-1)?.name.split(" ")[0];
	yield;
	tape.begin(`${layer} ${name}`);
}

function routeTokens(tape: Tape, context: LayerContext, router: RouterState, u: Tensor): Routing {
	const { moe } = context.config;
	const weight = "mlp.router.weight";
	using everyExpert = linear(tape, u, context.weights(weight), biasOf(context, weight), { outputDtype: "f32" });
	// Evaluation and decoding use the router's own logits.
	const forced = moe.forceLoadBalancing && tape.training;
	if (forced) {
		const { key, place, localTokens } = context.random;
		drawLogits(everyExpert, philoxKey(key, `${place}.router`), localTokens);
	}
	const bias = moe.expertBias && !forced ? router.expertBias : null;
	const mask = context.layerMasks?.moe?.scores ?? null;
	const scores = mask && maskScores(tape, everyExpert, mask, bias);
	using logits = scores?.logits ?? everyExpert.share();
	using expertBias = scores ? scores.bias : (bias?.share() ?? null);
	router.onLogits?.(logits);
	const { tokens } = context.parallel;
	using logitOffsets =
		moe.sinkhorn && tape.training && !forced
			? sinkhornOffsets(logits, {
					tokens: context.sequences.tokens,
					sumOverRanks: (columns) => tokens.allReduce(columns).wait(),
				})
			: null;
	const zLoss = router.sums.get("z_loss");
	const routing = route(tape, logits, {
		topk: moe.topk,
		scoreFunction: moe.scoreFunction,
		preSoftmax: moe.preSoftmax,
		scalingFactor: moe.scalingFactor,
		expertBias,
		logitOffsets,
		groups: moe.groups > 1 ? { count: moe.groups, topk: moe.groupTopk, scoreTopk: moe.groupScoreTopk } : null,
		tokensPerExpert: tape.training ? router.tokensPerExpert : null,
		statistics: moe.balancing.length > 0 && tape.training ? context.localSequences : null,
		zLoss: zLoss && tape.training ? { sum: zLoss, gradientScale: zLossScale(context, router) } : null,
	});
	const shares = context.layerMasks?.moe?.shares ?? null;
	if (shares && moe.biasUpdateRate > 0 && tape.training && !tape.replaying) router.expect(shares, u.rows * moe.topk);
	if (tape.training && !tape.replaying) router.onRouting?.(routing.expertIndex, logits, routing.probabilities);
	if (routing.statistics) {
		context.pooled?.add(tape, router, routing.statistics, context.routerWeight);
		addBalancingLosses(tape, router, routing.statistics, context.routerWeight, tokens);
	}
	return routing;
}

/** Weight of a token's z-loss; the loss of a microbatch is their mean (docs/spec/language-model.md §4.4). */
function zLossScale({ config, routerWeight, sequences }: LayerContext, { options }: RouterState): number {
	return (config.moe.zLossCoefficient * (routerWeight / sequences.tokens)) / options.passes;
}

function flops(c: TrainingConfiguration): number {
	const width = c.moeLatentSize ?? c.hiddenSize;
	return (
		2 * c.numExperts * c.hiddenSize +
		4 * c.hiddenSize * (c.moeLatentSize ?? 0) +
		c.moeRouterTopk * feedForwardFlops({ ...c, hiddenSize: width }, c.moeFfnHiddenSize) +
		feedForwardFlops(c, c.moeSharedExpertIntermediateSize)
	);
}

/** Without the router. */
function megatronFlops(c: TrainingConfiguration, tokens: number): number {
	const routed = (c.moeLatentSize ?? c.hiddenSize) * c.moeFfnHiddenSize * c.moeRouterTopk;
	const shared = c.hiddenSize * c.moeSharedExpertIntermediateSize;
	const factor = hasGatedActivation(c) ? 1.5 : 1;
	return 4 * tokens * (factor * (routed + shared) + c.hiddenSize * (c.moeLatentSize ?? 0));
}
