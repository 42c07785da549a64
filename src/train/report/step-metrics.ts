/**
 * Collects the step metrics of all ranks on the reporting rank (time by part, FLOPs, device memory, expert loads). The other
 * ranks do not wait for it.
 */
import type { TrainingConfiguration } from "../../config/schema.ts";
import { featuresOf, type ImageTextMicrobatch } from "../../data/microbatch.ts";
import { countFlopsPerToken } from "../../models/language/counts.ts";
import type { HybridModel } from "../../models/language/model.ts";
import { encoderFlops } from "../../models/vit/tower.ts";
import type { Device, DeviceEvent } from "../../native/device.ts";
import type {
	ByLayer,
	ModuleReport,
	Observer,
	RankMemory,
	StepReport,
	StepSeconds,
} from "../../observe/step-report.ts";
import { hostTimestamps, StepClock, type StepPart, Timers, type Timestamps, timerNames } from "../../observe/timers.ts";
import type { Grid, World } from "../../parallel/index.ts";
import { isReportingRank, type Run } from "../assemble.ts";
import type { Listener } from "../listeners.ts";
import type { StepResult } from "../step-state.ts";
import { stepTokensOf } from "./router-report.ts";
import { SlowRanks } from "./slow-ranks.ts";

const parts: readonly StepPart[] = ["compute", "bridge", "wait", "gradients", "optimizer", "data", "other"];
/** Units of the exchanged integers: microseconds, MFLOP in two halves, KiB. */
const unit = { second: 1e6, flops: 1e6, byte: 1 / 1024 };
const half = 2 ** 31;

/** A function that returns when the device has finished all queued work; the CPU library has when a call returns. */
function settleOf(device: Device): () => void {
	return device.library.kind === "cpu" ? () => {} : () => device.synchronize();
}

/** Host times for the CPU library, which is synchronous; recorded events for a GPU. */
function timestampsOf(device: Device): Timestamps {
	if (device.library.kind === "cpu") return hostTimestamps();
	let events: DeviceEvent[] = [];
	return {
		record: () => {
			const event = device.createEvent();
			event.record(device.stream);
			events.push(event);
		},
		take: () => {
			device.synchronize();
			const [now, last] = [performance.now(), events.at(-1)];
			const timestamps = events.map((event) => now - last!.millisecondsSince(event));
			for (const event of events) event[Symbol.dispose]();
			events = [];
			return timestamps;
		},
	};
}

/** The collected fields of a step's report. */
export type Collected = Pick<StepReport, "modules" | "memory" | "layerLosses" | "tokensPerExpert" | "padding">;

export class StepMetrics {
	readonly clock: StepClock;
	readonly #flopsPerToken: number;
	readonly #slow: SlowRanks | null;
	/** Sentences about ranks that turned out to be slow in the latest step. */
	slowRanks: readonly string[] = [];

	constructor(
		c: TrainingConfiguration,
		private readonly run: Run,
		private readonly world: World,
	) {
		const { device } = world;
		this.clock = new StepClock(timestampsOf(device));
		this.#flopsPerToken = run.language ? flopsPerToken(c, run.language) : 0;
		const stages = this.#grids.flatMap((grid) =>
			Array.from({ length: grid.shape.pipeline }, (_, stage) => grid.lanesOf(stage).flat()),
		);
		this.#slow = c.slowRankSteps === null ? null : new SlowRanks(stages, c.slowRankSteps);
	}

	/**
	 * Collects the metrics of step `iteration`, whose clock has been stopped. Collective over the world. Returns the collected fields on
	 * the reporting rank, null on others.
	 */
	collect(
		iteration: number,
		microbatches: readonly ImageTextMicrobatch[],
		result: StepResult,
		seconds: StepSeconds,
	): Collected | null {
		const statistics = this.world.device.memoryStatistics();
		const megaFlops = Math.round(this.#flopsOf(microbatches) / unit.flops);
		// Ranks of a lane have the same samples, so one of them counts padding.
		const counts = this.run.state.lossOwner?.counts ?? false;
		const filled = counts ? microbatches.filter(({ text }) => text.padding !== undefined) : [];
		const own = Int32Array.from([
			filled.reduce((sum, { text }) => sum + text.padding!, 0),
			filled.reduce((sum, { text }) => sum + text.ids.length, 0),
			...parts.map((part) => Math.round(seconds[part] * unit.second)),
			Math.floor(megaFlops / half),
			megaFlops % half,
			...[statistics.liveBytes, statistics.reservedBytes, statistics.peakBytes].map((bytes) => bytes * unit.byte),
		]);
		const { world, language } = this.run.state;
		const asked = language !== null && (language.stages.size > 1 || isReportingRank(this.run));
		const tokensPerExpert = asked ? stepTokensOf(language.model, language.stages) : null;
		if (!isReportingRank(this.run)) {
			world.contribute(own);
			return null;
		}
		const everyone = world.exchange(own).map(readRank);
		const busy = everyone.map((one) => busyOf(one.seconds));
		this.slowRanks = this.#slow?.step(iteration, busy) ?? [];
		const total = (what: "padding" | "filled") => everyone.reduce((sum, one) => sum + one[what], 0);
		return {
			...(total("filled") > 0 && { padding: total("padding") / total("filled") }),
			modules: this.#modules(everyone),
			memory: everyone.map(({ memory }) => memory),
			...this.#experts(result, tokensPerExpert),
		};
	}

	/** This rank's FLOPs of the step, forward and backward; ranks that share a microbatch each count an equal part. */
	#flopsOf(microbatches: readonly ImageTextMicrobatch[]): number {
		const { encoders, languageGroups } = this.run;
		let flops = 0;
		for (const batch of microbatches) {
			const { text } = batch;
			flops += (text.ids.length * this.#flopsPerToken) / (languageGroups?.model.tokens.size ?? 1);
			for (const { name, module } of encoders) {
				const { grids } = featuresOf(batch, name);
				for (const grid of grids) flops += (3 * encoderFlops(module.config, grid)) / module.parallel.tp.size;
			}
		}
		return flops;
	}

	#modules(everyone: readonly RankStep[]): ModuleReport[] {
		return this.#grids.map((grid) => moduleReport(grid, everyone));
	}

	/** Colocated modules share ranks and times, so they are one report. */
	get #grids(): readonly Grid[] {
		const { modules, language, colocated } = this.run.topology;
		return colocated ? [language] : modules;
	}

	/** Fields about experts; `tokensPerExpert` is null on ranks that do not report. */
	#experts(
		{ balancingByLayer }: StepResult,
		tokensPerExpert: ByLayer<readonly number[]> | null,
	): Pick<StepReport, "layerLosses" | "tokensPerExpert"> {
		if (balancingByLayer.size === 0 || tokensPerExpert === null) return {};
		const names = Object.keys([...balancingByLayer.values()][0]!);
		const ofLayers = (name: string): ByLayer<number> =>
			new Map([...balancingByLayer].map(([layer, losses]) => [layer, losses[name]!]));
		return { layerLosses: Object.fromEntries(names.map((name) => [name, ofLayers(name)])), tokensPerExpert };
	}
}

/** FLOPs of a token in this rank's chunks, forward and backward. */
function flopsPerToken(c: TrainingConfiguration, { chunks }: HybridModel): number {
	const { layers, logits } = countFlopsPerToken(c);
	return chunks.reduce((sum, { segment: { begin, end, hasHead } }) => {
		const own = layers.slice(begin, end).reduce((flops, layer) => flops + layer, 0);
		return sum + 3 * (own + (hasHead ? logits : 0));
	}, 0);
}

interface RankStep {
	/** Padding tokens, and all tokens of microbatches that have any. */
	readonly padding: number;
	readonly filled: number;
	readonly seconds: StepSeconds;
	readonly flops: number;
	readonly memory: RankMemory;
}

function readRank([padding, filled, ...values]: Int32Array): RankStep {
	const seconds = Object.fromEntries(
		parts.map((part, i) => [part, values[i]! / unit.second]),
	) as unknown as StepSeconds;
	const [high, low, allocated, reserved, peak] = values.slice(parts.length);
	const bytes = (kibibytes: number | undefined) => kibibytes! / unit.byte;
	return {
		padding: padding!,
		filled: filled!,
		seconds,
		flops: (high! * half + low!) * unit.flops,
		memory: { allocated: bytes(allocated), reserved: bytes(reserved), peak: bytes(peak) },
	};
}

/** Seconds of the step without waiting for other ranks. */
const busyOf = (seconds: StepSeconds) =>
	parts.reduce((sum, part) => sum + (part === "bridge" || part === "wait" ? 0 : seconds[part]), 0);

function moduleReport({ name, ranks, size }: Grid, everyone: readonly RankStep[]): ModuleReport {
	const own = ranks.map((rank) => everyone[rank]!);
	const mean = (value: (one: RankStep) => number) => own.reduce((sum, one) => sum + value(one), 0) / size;
	const seconds = Object.fromEntries(
		parts.map((part) => [part, mean((one) => one.seconds[part])]),
	) as unknown as StepSeconds;
	const whole = parts.reduce((sum, part) => sum + seconds[part], 0);
	const busy = own.map((one) => busyOf(one.seconds));
	const slowest = busy.indexOf(Math.max(...busy));
	return {
		name,
		ranks: size,
		seconds,
		flops: own.reduce((sum, one) => sum + one.flops, 0),
		idle: whole > 0 ? (seconds.bridge + seconds.wait) / whole : 0,
		slowest: { rank: ranks[slowest]!, busy: busy[slowest]! },
	};
}

// Megatron's timers: each rank measures its own; the reporting rank collects them for each log line.

/** Seconds of one exchanged integer: the last digit that is shown. */
const timerUnit = 1e-5;

/** Opens the timers; null: --timing-log-level is 0. */
export function openTiming(
	c: TrainingConfiguration,
	run: Run,
	world: World,
	observer: Observer,
): { readonly timers: Timers; readonly listener: Listener } | null {
	if (c.timingLogLevel === 0) return null;
	const timers = new Timers(c.timingLogLevel, settleOf(world.device));
	let steps = 0;
	let first = true;
	const listener: Listener = {
		afterStep: ({ progress: { iteration } }) => {
			steps++;
			if (!first && iteration % c.logInterval !== 0) return;
			const own = timerNames.map((name) => {
				const seconds = timers.seconds(name) / steps;
				return seconds > 0 ? Math.max(1, Math.round(seconds / timerUnit)) : 0;
			});
			if (!isReportingRank(run)) run.state.world.contribute(Int32Array.from(own));
			else {
				const everyone = run.state.world.exchange(Int32Array.from(own));
				const seconds = new Map(timerNames.map((name, i) => [name, everyone.map((values) => values[i]! * timerUnit)]));
				observer.timers?.({ iteration, option: c.timingLogOption, seconds });
			}
			// The first step is averaged into the second line, as in the log line that this one follows.
			if (!first) {
				timers.reset();
				steps = 0;
			}
			first = false;
		},
	};
	return { timers, listener };
}
