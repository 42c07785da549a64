/**
 * Looks for wrong results of a rank: parameters of which data-parallel replicas hold other bits, state that has changed since its
 * update, and values that are far too large (docs/decisions/restarts.md).
 */
import type { TrainingConfiguration } from "../config/schema.ts";
import type { OptimizerShard } from "../optim/optimizer.ts";
import type { DataParallel, Group } from "../parallel/index.ts";
import { UserError, WrongResult } from "../system/errors.ts";
import { Tensor } from "../tensor/index.ts";
import type { Run } from "./assemble.ts";
import type { Listener, Progress } from "./listeners.ts";

/** Of each list of tensors a 64-bit checksum, as two words. Waits for the device. */
export function checksums(lists: readonly (readonly Tensor[])[]): Int32Array {
	const device = lists.flat()[0]?.device;
	if (device === undefined) return new Int32Array(2 * lists.length);
	using sums = Tensor.zeros(device, [2 * lists.length], "i32", "workspace");
	lists.forEach((tensors, index) => {
		using sum = sums.columns(2 * index, 2);
		for (const x of tensors) device.run("checksum", { x, sum, elements: x.bytes / 4 });
	});
	return sums.toInt32();
}

/** Members of a group whose words differ from those of more than half of all; null: there are no such. */
export function outvoted(all: readonly Int32Array[]): readonly number[] | null {
	const members = [...all.keys()];
	const sides = [...Map.groupBy(members, (member) => all[member]!.join()).values()];
	const most = sides.find((side) => 2 * side.length > all.length);
	return most === undefined ? null : members.filter((member) => !most.includes(member));
}

/** Checksums of a rank's state after a step. */
export interface StateWords {
	readonly step: number;
	readonly words: readonly number[];
}

/** Tensors that all members of a group hold in equal bits; group null: tensors of this rank alone. */
interface Shared {
	readonly group: Group | null;
	readonly tensors: readonly Tensor[];
}

export class StateCheck implements Listener {
	readonly #shared: readonly Shared[];
	/** Of the last step; null: they are not known. */
	#known: StateWords | null = null;

	private constructor(
		private readonly c: TrainingConfiguration,
		private readonly interval: number,
		private readonly rank: number,
		{ replicas, optimizer }: Run["state"],
	) {
		this.#shared = replicas.flatMap((replica) => sharedOf(replica, optimizer.shards));
	}

	/** null: none is asked for. */
	static open(c: TrainingConfiguration, { rank, state }: Run): StateCheck | null {
		const interval = c.checkWeightHashAcrossDpReplicasInterval;
		return interval === null ? null : new StateCheck(c, interval, rank, state);
	}

	/** Checksums of the last step; null: they are not known. */
	get known(): StateWords | null {
		return this.#known;
	}

	/** Takes checksums of the state that a restart has restored. Returns whether it has them. */
	resume(known: StateWords): boolean {
		this.#known = known;
		return this.#unchanged(known);
	}

	/** Compares this rank's state with that after the last update, if that is known. */
	beforeUpdate(): void {
		const known = this.#known;
		this.#known = null;
		if (known === null || this.#unchanged(known)) return;
		throw new WrongResult(
			this.rank,
			`Parameters or optimizer state of rank ${this.rank} have changed since the update of step ${known.step}: its memory is at fault.`,
		);
	}

	betweenSteps({ iteration }: Progress): void {
		const { saveInterval, nonPersistentSaveInterval, exitInterval } = this.c;
		// A state that is kept has been compared.
		const due = [this.interval, saveInterval, nonPersistentSaveInterval, exitInterval];
		if (due.some((interval) => interval !== null && iteration % interval === 0)) this.#compare(iteration);
	}

	afterTraining({ iteration }: Progress): void {
		if (this.#known === null) this.#compare(iteration);
	}

	/** Compares replicas after a step. */
	#compare(step: number): void {
		const words = this.#words();
		this.#known = { step, words: [...words] };
		this.#shared.forEach(({ group }, index) => {
			if (group === null) return;
			const all = group.exchange(words.subarray(2 * index, 2 * index + 2));
			const wrong = outvoted(all);
			if (wrong?.length === 0) return;
			const named = (members: readonly number[]) => namesOf(members.map((member) => group.ranks[member]!));
			const everyone = [...all.keys()];
			if (wrong === null) {
				throw new WrongResult(
					null,
					`After step ${step} the parameters of ${named(everyone)}, data-parallel replicas, differ, and no more than half of them agree.`,
				);
			}
			const right = everyone.filter((member) => !wrong.includes(member));
			throw new WrongResult(
				group.ranks[wrong[0]!]!,
				`After step ${step} the parameters of ${named(wrong)} differ from those of ${named(right)}, data-parallel replicas that agree.`,
			);
		});
	}

	#unchanged({ words }: StateWords): boolean {
		return this.#words().every((word, index) => word === words[index]);
	}

	#words(): Int32Array {
		return checksums(this.#shared.map(({ tensors }) => tensors));
	}
}

/** A rank's values, masters and optimizer states; the last two without ZeRO-1 are the same everywhere as well. */
function sharedOf(replica: DataParallel, shards: readonly OptimizerShard[]): Shared[] {
	return [...Map.groupBy(replica.parameters.buffers, (buffer) => replica.groupOf(buffer))].flatMap(
		([group, buffers]) => {
			const updated = shards.filter(({ buffer }) => buffers.includes(buffer));
			const states = updated.flatMap(({ master, states, buffer }) => [
				// Values in fp32 are their own masters.
				...(buffer.dtype === "f32" ? [] : [master]),
				...states.values(),
			]);
			const values = buffers.map((buffer) => buffer.values);
			if (group.size === 1) return [{ group: null, tensors: [...values, ...states] }];
			if (!replica.distributedOptimizer) return [{ group, tensors: [...values, ...states] }];
			return [
				{ group, tensors: values },
				{ group: null, tensors: states },
			];
		},
	);
}

/** "rank 2", "ranks 0, 1 and 3". */
function namesOf(ranks: readonly number[]): string {
	const list = ranks.join(", ").replace(/, (\d+)$/, " and $1");
	return `${ranks.length === 1 ? "rank" : "ranks"} ${list}`;
}

/**
 * Values that are far larger than the first ones: errors of arithmetic often have a wrong exponent (Megatron-LM
 * core/rerun_state_machine.py, is_unexpectedly_large). A restart begins anew, so the same value again is taken for right.
 */
export class LargeValues {
	#seen = 0;
	#largest = 0;

	constructor(private readonly what: string) {}

	/** Throws a UserError for a value of at least ten times the largest of the first hundred. */
	require(step: number, value: number): void {
		const [samples, factor] = [100, 10];
		if (this.#seen++ < samples) {
			this.#largest = Math.max(this.#largest, value);
			return;
		}
		if (value < factor * this.#largest) return;
		throw new UserError(
			`Step ${step}: the ${this.what} is ${value}, ${factor} times as large as any of the ${samples} steps that this process began with, or more (${this.#largest} at most).`,
		);
	}
}
