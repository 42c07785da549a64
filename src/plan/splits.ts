/** Every way to divide N devices between encoder and language model that the configuration allows, best first. */
import { hasEncoder, sharesRanks } from "../config/derive.ts";
import { configurationOf, type ResolvedConfiguration } from "../config/resolve.ts";
import { type Key, keys, propertyOf, type TrainingConfiguration } from "../config/schema.ts";
import { UserError } from "../native/errors.ts";
import { topologyOf } from "../parallel/topology.ts";
import { estimateStep, type PlannedActor, type StepEstimate } from "./estimate.ts";
import { planRank, type RankPlan } from "./rank-plan.ts";
import { actorRanks, conditionsOf, type Machine } from "./run-plan.ts";

export interface Split {
	/** Layout as `mimo train` takes it. */
	readonly layout: Readonly<Partial<Record<Key, number>>>;
	readonly encoderRanks: number;
	readonly languageRanks: number;
	readonly step: StepEstimate;
	/** The larger of both modules, bytes. */
	readonly peak: number;
	readonly fits: boolean;
	/** What holds the step up. */
	readonly reason: string;
}

/** The layout is the search's own. */
const layoutKeys: readonly Key[] = [
	"encoder-tp",
	"encoder-dp",
	"llm-offset",
	"llm-tp",
	"llm-dp",
	"llm-pp",
	"llm-ep",
	"llm-expt-tp",
	"tensor-parallel-num-weight-shards",
	"expert-tensor-parallel-num-weight-shards",
];
const tensorSizes = [1, 2, 4, 8];
const expertSizes = [1, 2, 4, 8, 16, 32];
/** Devices that may be left idle: so many, or this share of them. */
const idle = { devices: 3, share: 0.05 };

export async function rankSplits(resolved: ResolvedConfiguration, devices: number, machine: Machine): Promise<Split[]> {
	const plans = new Map<string, Promise<RankPlan>>();
	const splits: Split[] = [];
	for (const { layout, configuration: c } of layouts(resolved, devices)) {
		const planned: PlannedActor[] = [];
		for (const { actor, ranks } of actorRanks(c)) {
			const key = actor === "encoder" ? `${actor} ${c.encoderTp} ${c.encoderDp} ${c.llmDp}` : languageKey(c, actor);
			if (!plans.has(key)) plans.set(key, planRank(c, ranks[0]!, machine));
			planned.push({ actor, plan: await plans.get(key)!, ranks: ranks.length });
		}
		const topology = topologyOf(c);
		const step = estimateStep(planned, conditionsOf(c, machine));
		const peak = Math.max(...planned.map(({ plan }) => plan.memory.peak));
		const fits = machine.memoryBytes === null || peak <= machine.memoryBytes;
		const reason = reasonOf(step, peak, machine.memoryBytes);
		splits.push({
			layout,
			encoderRanks: topology.encoder?.size ?? 0,
			languageRanks: topology.language.size,
			step,
			peak,
			fits,
			reason,
		});
	}
	return splits.sort((a, b) => Number(b.fits) - Number(a.fits) || a.step.seconds - b.step.seconds);
}

/** What a language rank's plan depends on; colocated, its encoder too. */
function languageKey(c: TrainingConfiguration, stage: number): string {
	const encoder = sharesRanks(c) ? `${c.encoderTp} ${c.encoderDp}` : "";
	return `language ${c.llmTp} ${c.llmDp} ${c.llmEp} ${c.llmPp} ${stage} ${encoder}`;
}

/** Layouts that the configuration's own checks let pass. */
function* layouts(
	{ configuration, origins }: ResolvedConfiguration,
	devices: number,
): Generator<{ layout: Split["layout"]; configuration: TrainingConfiguration }> {
	const given = Object.fromEntries(
		keys
			.filter((key) => !layoutKeys.includes(key) && !["default", "derived"].includes(origins[key].source))
			.map((key) => [key, configuration[propertyOf(key)]]),
	);
	const lanes = configuration.globalBatchSize / configuration.microBatchSize;
	const batch = { "global-batch-size": configuration.globalBatchSize };
	for (const tp of tensorSizes) {
		for (let dp = 1; dp <= lanes && tp * dp <= devices; dp++) {
			if (lanes % dp !== 0) continue;
			for (const ep of expertSizes) {
				for (const encoder of encoders(configuration, devices - tp * dp, devices)) {
					const layout = { ...encoder, "llm-tp": tp, "llm-dp": dp, "llm-ep": ep };
					try {
						yield { layout, configuration: configurationOf({ ...given, ...batch, ...layout }) };
					} catch (error) {
						if (!(error instanceof UserError)) throw error;
					}
				}
			}
		}
	}
}

/** Encoder grids of at most `room` ranks that leave few of the devices idle. */
function encoders(c: TrainingConfiguration, room: number, devices: number): Split["layout"][] {
	const least = Math.max(1, room - Math.max(idle.devices, Math.floor(idle.share * devices)));
	if (!hasEncoder(c)) return least <= 1 || room === 0 ? [{}] : [];
	const found: Split["layout"][] = [];
	for (const tp of [1, 2]) {
		for (let dp = Math.ceil(least / tp); dp * tp <= room; dp++) found.push({ "encoder-tp": tp, "encoder-dp": dp });
	}
	return found;
}

/** The largest cost of the slower module. */
function reasonOf({ modules, limitedByCores }: StepEstimate, peak: number, memory: number | null): string {
	if (memory !== null && peak > memory) return `needs ${(peak / 2 ** 30).toFixed(1)} GiB on a rank`;
	if (limitedByCores) return "fewer cores than ranks";
	const slower = modules.toSorted((a, b) => a.idle - b.idle)[0]!;
	const other = modules.find((one) => one !== slower);
	const name = slower.module === "language" ? "the language model" : "the encoder";
	const update = slower.gradients + slower.optimizer;
	const passes = slower.forward + slower.backward;
	const share = update > passes ? ", more in its update than in a microbatch" : "";
	const waits = other ? `; the other idles ${(100 * other.idle).toFixed(0)} %` : "";
	return `${name} works throughout${share}${waits}`;
}
