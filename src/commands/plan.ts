/** `mimo plan`: estimates a run's memory, operations, traffic and step time without training. */

import { existsSync } from "node:fs";
import { availableParallelism } from "node:os";
import * as v from "valibot";
import { mostRanks } from "../config/checks/layout.ts";
import { configurationOf, type ResolvedConfiguration } from "../config/resolve.ts";
import { type Key, keys, propertyOf, type TrainingConfiguration } from "../config/schema.ts";
import { readChoice } from "../guests/elastic/submodel/choice.ts";
import { submodelKeys } from "../guests/elastic/submodel/configuration.ts";
import type { Submodel } from "../guests/elastic/submodel/submodel.ts";
import { hybridConfig } from "../models/language/from-configuration.ts";
import { openLibraryOf } from "../native/open-device.ts";
import { print } from "../observe/output.ts";
import { checkedFields, entryText, LARGEST_LOG_LINE, parseEntry } from "../observe/run-log/entry.ts";
import { largestOf } from "../observe/series.ts";
import { topologyOf } from "../parallel/index.ts";
import { acceleratorNames, acceleratorRates } from "../plan/accelerators.ts";
import { rankSplits } from "../plan/layout-search.ts";
import { measureRates } from "../plan/measure.ts";
import { processorRates, type Rates, ratesSchema } from "../plan/rates.ts";
import { type Machine, planRun } from "../plan/run-plan.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { linesOf } from "../system/input-file.ts";
import { configLimits, readJsonText } from "../system/json.ts";
import { configurationOfArguments, configuredCommand, countFlag, numberFlag } from "./arguments.ts";
import { planJson, planText, splitsJson, splitsText } from "./plan-text.ts";

const help = `mimo plan [--preset NAME] [--config FILE.yaml] [FLAGS]

  Estimates, for every module, the memory of a rank, operations, bytes sent in every group, seconds of a step and idle
  shares, by running the training code on a library that only counts.

  --gpu NAME              Plan for ${acceleratorNames.join(", ")}; without it, for this machine's processor.
  --gpus-per-host N       Consecutive ranks of one host (8).
  --memory-gib N          Memory of a device; layouts that need more are marked.
  --measure               Time every operation of the configuration on this machine first.
  --rates FILE            Read rates from this file; with --measure, write them there.
  --split N               Rank the layouts of N devices by tokens a second: modules on the same ranks or on ranks of their own, with
                          and without pipeline and virtual stages.
  --expert-imbalance F    Rows of the busiest rank's experts relative to an even routing (default 1); or a run's JSON log, whose
                          largest value is taken.
  --choice FILE           Plan the submodel with these sizes of the configured model (\`mimo elastic\`).
  --json                  One JSON object.`;

/** Flags that are not configuration keys, and whether they take a value. */
export const ownFlags = {
	gpu: acceleratorNames,
	"gpus-per-host": true,
	"memory-gib": true,
	measure: false,
	rates: true,
	split: true,
	"expert-imbalance": true,
	choice: true,
	json: false,
} as const;

export default configuredCommand({
	name: "plan",
	description: "Estimate a run's memory, operations, traffic and step time.",
	help,
	ownFlags,
	run: async (args) => {
		const resolved = withChoice(configurationOfArguments(args, ownFlags, { trains: false }));
		const machine = await machineOf(resolved);
		const { command, configuration } = resolved;
		if (command.split !== undefined) {
			if (command.split.includes(",")) {
				throw new UserError(
					`--split ${command.split}: here it is the number of devices whose layouts are ranked; shares of the data change no plan.`,
					exitCodes.usage,
				);
			}
			const devices = countFlag(command, "split", 1);
			if (devices > mostRanks) {
				throw new UserError(`--split ${command.split}: a run has at most ${mostRanks} ranks.`, exitCodes.usage);
			}
			const ranked = await rankSplits(resolved, devices, machine);
			if (ranked.splits.length === 0) {
				throw new UserError(
					`--split ${command.split}: no layout of so many devices divides global-batch-size ${configuration.globalBatchSize} and the model's sizes.`,
				);
			}
			print("json" in command ? splitsJson(ranked) : splitsText(ranked, machine, configuration));
			return;
		}
		const plan = await planRun(configuration, machine);
		print("json" in command ? planJson(plan, machine) : planText(plan, machine));
	},
});

/** Replaces the configured model by the submodel of --choice, if given. */
function withChoice(resolved: ResolvedConfiguration): ResolvedConfiguration {
	const { choice } = resolved.command;
	if (choice === undefined) return resolved;
	return configurationOfSubmodel(resolved, readChoice(choice, hybridConfig(resolved.configuration)));
}

/** The machine that the flags describe; with --measure, this machine's measured rates. */
export async function machineOf({ command, configuration: c }: ResolvedConfiguration): Promise<Machine> {
	const stated = command.gpu === undefined ? null : acceleratorRates(command.gpu);
	if (stated?.e4m3 === false && c.fp8Format !== null) {
		throw new UserError(`--gpu ${command.gpu}: it has no products in e4m3 (fp8-format).`, exitCodes.usage);
	}
	const { worldSize } = topologyOf(c);
	const ranksPerHost = stated ? countFlag(command, "gpus-per-host", 8) : worldSize;
	const cores = availableParallelism();
	const threads = c.threads || Math.max(1, Math.floor(cores / Math.min(worldSize, ranksPerHost)));
	const gibibytes = numberFlag(command, "memory-gib", null, ...atLeast(0));
	const common = {
		memoryBytes: gibibytes === null ? (stated?.memoryBytes ?? null) : gibibytes * 2 ** 30,
		ranksPerHost,
		imbalance: imbalanceOf(command, c),
	};
	if ("measure" in command) {
		const library = await openLibraryOf(c.device);
		const rates = await measureRates(c, library, { threads, ranks: Math.min(worldSize, ranksPerHost) });
		if (command.rates !== undefined) await Bun.write(command.rates, `${JSON.stringify(rates, null, "\t")}\n`);
		return { ...common, rates, kind: library.kind };
	}
	const rates = command.rates === undefined ? stated?.rates : readRates(command.rates);
	return { ...common, kind: stated ? "cuda" : "cpu", rates: rates ?? processorRates(cores, threads) };
}

function imbalanceOf(command: Readonly<Record<string, string>>, c: TrainingConfiguration): number {
	const text = command["expert-imbalance"];
	const measured = text !== undefined && existsSync(text);
	const imbalance = measured
		? measuredImbalance(text, c.numExperts / c.llmEp)
		: numberFlag(command, "expert-imbalance", 1, ...atLeast(1));
	if (c.moeRouterForceLoadBalancing && imbalance !== 1) {
		throw new UserError(
			`--expert-imbalance ${text}: allowed is 1 with moe-router-force-load-balancing, which routes tokens evenly.`,
			exitCodes.usage,
		);
	}
	return imbalance;
}

function readRates(file: string): Rates {
	if (!existsSync(file)) {
		throw new UserError(`--rates ${file}: there is no such file; \`mimo plan --measure --rates ${file}\` writes it.`);
	}
	const text = readJsonText(file, configLimits);
	try {
		return v.parse(ratesSchema, JSON.parse(text));
	} catch {
		throw new UserError(`--rates ${file}: this is not a file that \`mimo plan --measure\` wrote.`);
	}
}

/** The last arguments of numberFlag for a number with a lower bound. */
function atLeast(least: number): [allowed: string, allows: (value: number) => boolean] {
	return [`a number of at least ${least}`, (value) => value >= least];
}

// Measures the routing imbalance of an earlier run from its log.

/**
 * Rows of the busiest rank's experts over those of an even routing, in the step in which that was most: a mean over
 * layers, because a rank holds all of them. `expertsPerRank`: how the plan's layout deals them out, which may differ
 * from the run's.
 */
export function measuredImbalance(log: string, expertsPerRank: number): number {
	let most = 0;
	for (const { number, bytes } of linesOf(log, { limit: LARGEST_LOG_LINE, unended: false })) {
		const name = `${log}, line ${number}`;
		const entry = parseEntry(entryText(bytes, name));
		const loads = entry === null ? [] : checkedFields(entry, name).experts.map(([, counts]) => counts);
		if (loads.length > 0) most = Math.max(most, busiestRank(loads, expertsPerRank));
	}
	if (most === 0) throw new UserError(`--expert-imbalance ${log}: this log has no tokens_per_expert.`);
	return most;
}

function busiestRank(layers: readonly (readonly number[])[], expertsPerRank: number): number {
	const ranks = layers[0]!.length / expertsPerRank;
	const sums = new Array<number>(ranks).fill(0);
	for (const experts of layers) {
		const even = experts.reduce((sum, tokens) => sum + tokens, 0) / ranks;
		for (const [expert, tokens] of experts.entries()) sums[Math.floor(expert / expertsPerRank)]! += tokens / even;
	}
	return largestOf(sums) / layers.length;
}

// A run's configuration with a submodel in the place of its model.

/** Sizes that follow from others unless they are given: the submodel has the parent's. */
const kept: readonly Key[] = [
	"kv-channels",
	"ffn-hidden-size",
	"num-query-groups",
	"num-attention-heads",
	"mamba-num-heads",
	"num-experts",
	"moe-ffn-hidden-size",
];

/** Throws a UserError where the layout does not divide the submodel's sizes. */
function configurationOfSubmodel(resolved: ResolvedConfiguration, submodel: Submodel): ResolvedConfiguration {
	const { configuration: c } = resolved;
	const own: Readonly<Record<string, unknown>> = { ...c, ...submodelKeys(c, submodel) };
	const configuration = configurationOf(Object.fromEntries(keys.map((key) => [key, own[propertyOf(key)]])), {
		trains: false,
	});
	const changed = keys.filter((key) => kept.includes(key) || !Bun.deepEquals(own[propertyOf(key)], c[propertyOf(key)]));
	const origins = Object.fromEntries(changed.map((key) => [key, { source: "program" } as const]));
	return { ...resolved, configuration, origins: { ...resolved.origins, ...origins } };
}
