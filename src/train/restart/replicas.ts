/**
 * Copies of what ranks keep for a restart (kept-state.ts), in the memory of another host: each rank has the file of the rank that is
 * `jump` before it, as of the same step. Ranks whose numbers differ by multiples of `jump` form a ring.
 */
import type { Group, World } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { systemReason } from "../../system/system-errors.ts";
import { Tensor } from "../../tensor/index.ts";
import { KeptFile, type Range, slots } from "./kept-file.ts";

/** Bytes of a row that ranks send each other, and rows of a message. */
const row = { bytes: 4096, most: 4096 };

export class Replicas implements Disposable {
	readonly #sent: Tensor;
	readonly #received: Tensor;
	/** Whether a copy had no room here. */
	#lacks = false;

	private constructor(
		private readonly own: KeptFile,
		/** That of the rank before this one. */
		private readonly other: KeptFile,
		private readonly ring: Group,
		private readonly warn: (sentence: string) => void,
		device: World["device"],
	) {
		const shape = [row.most, row.bytes / 4];
		this.#sent = Tensor.empty(device, shape, "i32", "workspace");
		this.#received = Tensor.empty(device, shape, "i32", "workspace");
	}

	/** null: all ranks are on one host. Throws a UserError if `jump` does not divide the ranks. Collective over the world. */
	static async open(
		own: KeptFile,
		world: World,
		jump: number,
		warn: (sentence: string) => void,
	): Promise<Replicas | null> {
		if (world.size <= jump) return null;
		if (world.size % jump !== 0) {
			throw new UserError(
				`replication: ${world.size} ranks are no multiple of ${jump} (replication-jump, else the ranks of a host).`,
			);
		}
		const first = world.rank % jump;
		const ranks = Array.from({ length: world.size / jump }, (_, index) => first + index * jump);
		const ring = await world.group("replicas", ranks);
		const other = new KeptFile(world.restarts!.replica, { layout: world.restarts!.layout, rank: world.rank });
		return new Replicas(own, other, ring, warn, world.device);
	}

	/** Gives the next rank a copy of this one's slot, and takes that of the one before. null: this rank has none. Collective. */
	spread(slot: number | null): void {
		const step = slot === null ? 0 : this.own.step(slot);
		const lengths = slot === null ? [0, 0, 0] : this.own.lengths(slot);
		const all = this.ring.exchange(Int32Array.of(step, slot ?? 0, ...lengths));
		// A rank without a copy makes those of the others useless.
		if (all.some(([one]) => one === 0)) return;
		const [theirs, at, ...expected] = all[this.#before]!;
		this.other.empty(at!);
		this.other.expect(at!, expected);
		const taken = this.other.rangesOf(at!);
		const known = this.#lacks;
		this.#lacks ||= attempt(() => this.other.makeRoom()) !== null;
		const into = this.#lacks ? null : this.other;
		this.#lacks ||= this.#move(this.own, this.own.rangesOf(slot!), this.#next, into, taken, this.#before) !== null;
		if (!this.#lacks) this.other.finish(at!, theirs!);
		else if (!known) {
			// The room that is left belongs to the copies of this host's own ranks.
			this.other.drop();
			this.warn(
				`What rank ${this.ring.ranks[this.#before]} keeps has no room in the memory of the next host: from step ${theirs} on it is lost with its host.`,
			);
		}
	}

	/** Steps of which a rank has its own copy, or the next one has it: of ranks in their order. `all`: what knownSteps() told. */
	stepsOf(all: readonly Int32Array[], rank: number): number[] {
		const jump = this.ring.ranks[1]! - this.ring.ranks[0]!;
		const holder = (rank + jump) % all.length;
		return [...all[rank]!.subarray(0, slots.length), ...all[holder]!.subarray(slots.length)];
	}

	/** Steps in this rank's own file, and in the copy of the rank before. */
	knownSteps(): Int32Array {
		return Int32Array.from([this.own, this.other].flatMap((file) => slots.map((slot) => file.step(slot))));
	}

	/** Brings a step's copy back to ranks that do not have their own. Collective. Returns whether any rank of the ring lacked it. */
	bringBack(step: number): boolean {
		const has = this.own.slotOf(step) !== null;
		const wanted = this.ring.exchange(Int32Array.of(has ? 0 : 1)).map(([one]) => one === 1);
		if (!wanted.includes(true)) return false;
		const held = wanted[this.#before] ? this.other.slotOf(step)! : null;
		const lengths = this.ring.exchange(Int32Array.from(held === null ? [0, 0, 0] : this.other.lengths(held)));
		const slot = 0;
		if (!has) {
			for (const one of slots) this.own.empty(one);
			this.own.expect(slot, [...lengths[this.#next]!]);
			this.own.makeRoom();
		}
		const given = held === null ? [] : this.other.rangesOf(held);
		const taken = has ? [] : this.own.rangesOf(slot);
		const problem = this.#move(this.other, given, this.#before, this.own, taken, this.#next);
		if (!has && problem !== null) throw new UserError(`The state of step ${step} cannot be brought back: ${problem}.`);
		if (!has) this.own.finish(slot, step);
		return true;
	}

	/** Steps that are done again are void. */
	forgetAfter(step: number): void {
		for (const slot of slots) if (this.other.step(slot) > step) this.other.empty(slot);
	}

	get #next(): number {
		return (this.ring.rank + 1) % this.ring.size;
	}

	get #before(): number {
		return (this.ring.rank + this.ring.size - 1) % this.ring.size;
	}

	/**
	 * Sends ranges of a file to a member, and writes what another sends into ranges of a file; null: it has no room. Collective over the
	 * ring. Returns why not all was written, or null.
	 */
	#move(
		from: KeptFile,
		given: Range[],
		to: number,
		into: KeptFile | null,
		taken: Range[],
		source: number,
	): string | null {
		let problem: string | null = null;
		const rows = (ranges: Range[]) => Math.ceil(ranges.reduce((sum, { bytes }) => sum + bytes, 0) / row.bytes);
		const [out, back] = [rows(given), rows(taken)];
		const rounds = Math.max(...this.ring.exchange(Int32Array.of(out)).map(([one]) => Math.ceil(one! / row.most)));
		const bytes = new Uint8Array(row.most * row.bytes);
		for (let round = 0; round < rounds; round++) {
			const part = (all: number) => Math.max(0, Math.min(row.most, all - round * row.most));
			const first = round * row.most * row.bytes;
			if (part(out) > 0) {
				for (const { piece, at } of pieces(given, first, bytes)) from.read(piece, at);
				this.#sent.device.copyToDevice(this.#sent, bytes);
			}
			this.ring.allToAll(this.#sent, this.#only(to, part(out)), this.#received, this.#only(source, part(back))).wait();
			if (part(back) > 0) {
				this.#received.device.copyToHost(bytes, this.#received);
				for (const { piece, at } of pieces(taken, first, bytes)) problem ??= attempt(() => into?.write(piece, at));
			}
		}
		return problem;
	}

	/** So many rows for one member, from the first on. */
	#only(member: number, count: number) {
		const offsets = Array<number>(this.ring.size).fill(0);
		return { offsets, counts: offsets.map((_, one) => (one === member ? count : 0)) };
	}

	[Symbol.dispose](): void {
		this.other[Symbol.dispose]();
		this.#sent[Symbol.dispose]();
		this.#received[Symbol.dispose]();
	}
}

/** Why the system refuses a write; null: it does not. */
function attempt(write: () => void): string | null {
	try {
		write();
		return null;
	} catch (error) {
		return systemReason(error);
	}
}

/** The parts of `bytes` that stand for ranges laid one after the other, from their byte `first` on, and where each lies. */
function* pieces(
	ranges: readonly Range[],
	first: number,
	bytes: Uint8Array,
): Generator<{ readonly piece: Uint8Array; readonly at: number }> {
	let begin = -first;
	for (const range of ranges) {
		const from = Math.max(0, begin);
		const to = Math.min(bytes.byteLength, begin + range.bytes);
		if (to > from) yield { piece: bytes.subarray(from, to), at: range.at + from - begin };
		begin += range.bytes;
	}
}
