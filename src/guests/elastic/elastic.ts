/**
 * An elastic language model: each microbatch trains a submodel whose sizes a router samples for a budget, and the router learns from
 * the losses (docs/spec/elastic.md).
 */
import type { TrainingConfiguration } from "../../config/schema.ts";
import { lossTokens } from "../../data/microbatch.ts";
import { familyEvent } from "../../observe/run-log/family.ts";
import { DataParallel, type ModuleGroups, type Topology } from "../../parallel/index.ts";
import { Tensor } from "../../tensor/index.ts";
import type { Evaluation, Guest, GuestReport, GuestStep, HeadView, LossTerm, RankGuest, StepGuest } from "../guest.ts";
import type { ElasticConfig } from "./config.ts";
import { elasticOf } from "./from-configuration.ts";
import { drawFor } from "./router/draws.ts";
import { type Draw, type DrawnBudget, routerPrefix, withoutNoise } from "./router/network.ts";
import { ElasticRouter, type Sampled } from "./router/router.ts";
import { budgetRecords } from "./submodel/family.ts";

/** A sampled submodel's distance from its budget (docs/spec/elastic.md §8, §12). */
export const budgetLossName = "budget loss";
/** Names of the language model loss over microbatches at the parent's budget, and at all other budgets. */
const tokenLosses = { parent: "lm loss (full)", other: "lm loss (budget)" } as const;

export interface ElasticOptions {
	readonly config: ElasticConfig;
	/**
	 * Draws repeat after this many microbatches and are equal in all lanes, so that layouts with other lanes can be compared;
	 * default: every microbatch of every set of lanes that shares experts has its own.
	 */
	readonly period?: number;
	/** Replaces the random draw, by iteration and microbatch of the lane. */
	readonly draw?: (iteration: number, microbatch: number) => Draw;
	/** Budgets that evaluations run, and whether they run the parent too; default: none beside it. */
	readonly evaluated?: { readonly parent: boolean; readonly budgets: readonly DrawnBudget[] };
}

export function elastic(options: ElasticOptions): Guest & { readonly options: ElasticOptions } {
	const { config, evaluated = { parent: true, budgets: [] } } = options;
	return {
		options,
		losses: () => [
			...(config.router.frozen ? [] : [{ name: budgetLossName, trainingOnly: true }]),
			...Object.values(tokenLosses).map((name) => ({ name, trainingOnly: true, partial: true })),
		],
		evaluations: evaluated.budgets.map(evaluationOf),
		evaluatedAlone: !evaluated.parent,
		open: ({ topology, language }) => {
			if (language === null) return null;
			const { module: model, groups } = language;
			const router = new ElasticRouter(config, model, groups.module.size);
			return new RankElastic(router, groups, options.draw ?? drawsOf(options, router, groups, topology));
		},
	};
}

/** The guest of a configuration, null if its model is not elastic; `period`: as in ElasticOptions. */
export function elasticGuest(c: TrainingConfiguration, options: Pick<ElasticOptions, "period"> = {}): Guest | null {
	const config = elasticOf(c);
	if (config === null) return null;
	const values = c.isFlexEval ? c.overrideSelectedBudget!.slice(0, 1) : config.budgets;
	const isParent = (value: number) => config.budget.type === "param" && value === 1;
	const budgets = values.map((value) => ({ value, parent: isParent(value) }));
	return elastic({ ...options, config, evaluated: { parent: !c.isFlexEval, budgets } });
}

/** The submodel that the router chooses for a budget, without noise. */
function evaluationOf(budget: DrawnBudget): Evaluation {
	return {
		label: `budget ${budget.value}`,
		value: budget.value,
		variants: (guests, count) => {
			const draws = new Array<Draw>(count).fill(withoutNoise(budget));
			return routerIn(guests)?.sample(draws, Number.POSITIVE_INFINITY, { trains: false }) ?? null;
		},
	};
}

function drawsOf(
	{ config, period }: ElasticOptions,
	router: ElasticRouter,
	{ model }: ModuleGroups,
	{ language: grid }: Topology,
): NonNullable<ElasticOptions["draw"]> {
	const sharing = model.experts?.group ?? model.tp;
	const lanes = period === undefined ? Math.min(...sharing.ranks.map((rank) => grid.coordinates(rank).dp)) : 0;
	return (iteration, microbatch) =>
		drawFor(config, { iteration, microbatch: microbatch % (period ?? Infinity), lanes }, router.parentBudget);
}

/** The router among a rank's guests; null: it has none. */
export function routerIn(guests: readonly RankGuest[]): ElasticRouter | null {
	return guests.find((guest) => guest instanceof RankElastic)?.router ?? null;
}

/** The router's weights are replicated on every rank of the language model, and its gradients are summed over all of them. */
export class RankElastic implements RankGuest {
	readonly modules: NonNullable<RankGuest["modules"]>;

	constructor(
		readonly router: ElasticRouter,
		{ module }: ModuleGroups,
		readonly draw: NonNullable<ElasticOptions["draw"]>,
	) {
		const ranks = { dense: module, expert: module, sequenceParallel: null, copies: null };
		const replica = new DataParallel(router.parameters, ranks);
		const { learningRateMultiplier } = router.config.router;
		const trained = { replica, prefix: routerPrefix, counts: module.rank === 0, learningRateMultiplier };
		this.modules = [{ module: router, trained }];
	}

	beforeStep({ microbatches, iteration, training }: GuestStep): StepGuest | null {
		if (!training) return null;
		const { router } = this;
		const draws = microbatches.map((_, microbatch) => this.draw(iteration, microbatch));
		const sampled = router.sample(draws, iteration, { trains: true });
		const { lossWeight } = router.config;
		return {
			variant: (microbatch) => sampled.microbatches[microbatch]!,
			losses: (pass) => lossesOf(sampled.microbatches[pass.microbatch]!, pass, router.config.router.frozen),
			afterBackward: (weights) =>
				router.addGradients(
					sampled,
					weights.map((weight) => lossWeight * weight),
				),
			[Symbol.dispose]: () => sampled[Symbol.dispose](),
		};
	}

	/** The submodels that the router now chooses for each budget, with their losses in an evaluation. */
	report(losses: Readonly<Record<string, number>>): GuestReport {
		const { config, model } = this.router;
		const records = budgetRecords({ config, weights: this.router.weights() }, model.config, losses);
		return {
			event: (step) => familyEvent(step, records),
			sentences: records.flatMap(({ budget, loss, active }) => {
				const size = `${(active / 1e6).toPrecision(3)} M active parameters`;
				return loss === null ? [] : [`Held-out loss at budget ${budget} (${size}): ${loss.toFixed(4)} a token.`];
			}),
		};
	}
}

/** The budget loss of a router that trains, which computes its gradient by itself, and the token losses by kind of budget. */
function lossesOf({ loss, whole }: Sampled, pass: HeadView, frozen: boolean): LossTerm[] {
	const scalar = (value: number) => pass.own(Tensor.from(pass.tape.device, Float32Array.of(value)));
	const { mask } = pass.input;
	const name = whole ? tokenLosses.parent : tokenLosses.other;
	const ofTokens = { name, loss: pass.nextToken().loss, mask, gradient: null };
	if (frozen) return [ofTokens];
	return [
		{ name: budgetLossName, loss: scalar(loss.value), mask: scalar(lossTokens(pass.text)), gradient: null },
		ofTokens,
	];
}
