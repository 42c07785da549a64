/** --profile-step-start … --profile-step-end: each rank traces these steps; the reporting rank merges the traces into one file. */
import type { TrainingConfiguration } from "../../config/schema.ts";
import type { RunRecords } from "../../observe/run-records.ts";
import type { StepClock } from "../../observe/timers.ts";
import { mergeTrace, partName, removeTrace, Tracer } from "../../observe/trace/tracer.ts";
import { exchangeTexts, type World } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { isReportingRank, type Run } from "../assemble.ts";
import type { Listener, Progress } from "../listeners.ts";

/** Rounds of clock comparison between hosts; the round with the shortest delay is used. */
const rounds = 8;
const second = 1e6;

export interface ProfileParts {
	readonly world: World;
	readonly clock: StepClock;
	readonly records: RunRecords;
	readonly say: (sentence: string) => void;
}

/** Opens the profiler; null: the configuration profiles no step. */
export function openProfile(
	c: TrainingConfiguration,
	run: Run,
	{ world, clock, records, say }: ProfileParts,
): Listener | null {
	const [first, last] = [c.profileStepStart, c.profileStepEnd ?? c.profileStepStart];
	if (first === null || last === null) return null;
	const { device } = world;
	const everyone = run.state.world;
	let tracer: Tracer | null = null;
	return {
		beforeStep: (iteration) => {
			if (iteration === first) {
				const { module, coordinates } = run.topology.describe(world.rank);
				const title = `rank ${world.rank}: ${module}, ${coordinates}`;
				tracer = new Tracer(device, world.rank, title, clockOrigin());
				device.tracer = tracer;
				clock.watch((part, began, ended) => tracer?.part(part, began, ended));
			}
			tracer?.step(iteration);
		},
		afterStep: ({ progress }) => {
			if (progress.iteration >= last) write(progress);
		},
		// Also when the training ends before the last profiled step.
		afterTraining: write,
	};

	function write(progress: Progress): void {
		if (tracer === null) return;
		const [traced, file] = [tracer, c.profileFile];
		device.tracer = null;
		clock.watch(null);
		const own = attempt(() => traced.write(partName(file, world.rank)));
		tracer = null;
		const failed = exchangeTexts(everyone, own).find((sentence) => sentence !== "");
		if (!isReportingRank(run)) return;
		const failure = failed ?? attempt(() => mergeTrace(file, world.size));
		if (failure === "") {
			say(`Traced steps ${first} to ${progress.iteration}: ${file}.`);
			return;
		}
		removeTrace(file, world.size);
		records.miss(`trace ${file}`, progress.iteration, failure);
	}

	/**
	 * The trace's clock in microseconds at performance.now() = 0. It follows rank 0's clock and reads one second when ranks
	 * compare clocks.
	 */
	function clockOrigin(): number {
		const own = performance.timeOrigin * 1000;
		// Ranks of the CPU library are on one host and share its clock.
		const shared = device.library.kind === "cpu";
		let best = { spread: Number.POSITIVE_INFINITY, origin: 0 };
		for (let round = 0; round < (shared ? 1 : rounds); round++) {
			everyone.barrier();
			const now = Math.round(own + performance.now() * 1000);
			const split = 2 ** 30;
			const digits = Int32Array.of(Math.floor(now / split / split), Math.floor(now / split) % split, now % split);
			const times = everyone.exchange(digits).map(([high, middle, low]) => (high! * split + middle!) * split + low!);
			const spread = Math.max(...times) - Math.min(...times);
			const zero = (shared ? times[0]! : now) - second;
			if (spread < best.spread) best = { spread, origin: own - zero };
		}
		return best.origin;
	}
}

/** The sentence of the UserError that `write` throws; "" where it throws none. */
function attempt(write: () => void): string {
	try {
		write();
		return "";
	} catch (error) {
		if (error instanceof UserError) return error.message;
		throw error;
	}
}
