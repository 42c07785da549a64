/**
 * The edge between encoder and language model (spec runtime 2): image rows go from encoder lanes to language lanes, their
 * gradients come back. Rows are sample-major; a lane that serves several others deals out whole samples, and one that is
 * served by several puts their rows one after the other and remembers how many came from each.
 */
import type { Device } from "../native/device.ts";
import { copyInto, type FloatDtype, Tensor } from "../tensor/tensor.ts";
import type { Group, Pending } from "./group.ts";
import type { Topology } from "./topology.ts";

/**
 * Microbatches whose rows the encoder has sent when it begins to wait for a gradient, beyond the one that the language
 * model is at. One would do if all passes took equally long; with two a pass that takes longer delays nobody.
 */
export const microbatchesAhead = 2;

/** Groups the bridge moves over. */
export interface BridgeGroups {
	/** Leaders of all lanes of both modules. */
	readonly leaders: Group | null;
	/** Ranks of this rank's lane. */
	readonly lane: Group;
}

interface Message {
	readonly values: Tensor;
	readonly pending: Pending;
}

/** Image rows of a microbatch and how many each of its samples has. */
export interface ImageRows {
	/** [Σ rows, H]; owned by the receiver. */
	readonly rows: Tensor;
	readonly rowsPerSample: readonly number[];
}

/** Sums of consecutive runs of `per` numbers. */
export function sumRuns(values: readonly number[], per: number): number[] {
	return Array.from({ length: values.length / per }, (_, run) =>
		values.slice(run * per, (run + 1) * per).reduce((sum, value) => sum + value, 0),
	);
}

/** Sends and receives between two leaders, and inside a lane from and to its leader. */
class Wire {
	/** On the way, a microbatch a list, oldest first. */
	readonly #sent: Message[][] = [];

	constructor(
		readonly device: Device,
		readonly groups: BridgeGroups,
		readonly width: number,
		readonly dtype: FloatDtype,
		/** This rank's lane leader, as its place in the lane. */
		readonly root: number,
	) {}

	get leads(): boolean {
		return this.groups.lane.rank === this.root;
	}

	/** What is sent from now on is of the next microbatch. */
	beginMicrobatch(): void {
		this.#sent.push([]);
	}

	/** Starts sending rows [begin, begin + count) to a leader (global rank); nothing moves for no rows. */
	send(rows: Tensor, begin: number, count: number, to: number): void {
		if (count === 0) return;
		this.#start(rows.rowsFrom(begin, count), to);
	}

	/** Fills rows [begin, begin + count) from a leader. */
	receive(rows: Tensor, begin: number, count: number, from: number): void {
		if (count === 0) return;
		using part = rows.rowsFrom(begin, count);
		this.#leaders.receive(part, this.#place(from)).wait();
	}

	/** Host integers to and from a leader. */
	sendCounts(counts: readonly number[], to: number): void {
		this.#start(Tensor.from(this.device, Int32Array.from(counts)), to);
	}

	/** Takes over `values`. */
	#start(values: Tensor, to: number): void {
		this.#sent.at(-1)!.push({ values, pending: this.#leaders.send(values, this.#place(to)) });
	}

	receiveCounts(length: number, from: number): number[] {
		using tensor = Tensor.empty(this.device, [length], "i32", "communication");
		this.#leaders.receive(tensor, this.#place(from)).wait();
		return [...tensor.toInt32()];
	}

	/** The leader's integers and rows, on every rank of the lane. Takes over `mine`. */
	broadcast(mine: ImageRows | null, samples: number): ImageRows {
		const { lane } = this.groups;
		if (lane.size === 1) return mine!;
		const counts = mine ? Int32Array.from(mine.rowsPerSample) : new Int32Array(samples);
		using header = Tensor.from(this.device, counts);
		lane.broadcast(header, this.root).wait();
		const rowsPerSample = [...header.toInt32()];
		const total = rowsPerSample.reduce((sum, rows) => sum + rows, 0);
		const rows = mine?.rows ?? this.empty(total);
		if (total > 0) lane.broadcast(rows, this.root).wait();
		return { rows, rowsPerSample };
	}

	empty(rows: number): Tensor {
		return Tensor.empty(this.device, [rows, this.width], this.dtype, "communication");
	}

	/** Waits for what was sent, but for the newest `underWay` microbatches, and lets go of it. */
	settle(underWay = 0): void {
		for (const { values, pending } of this.#sent.splice(0, Math.max(0, this.#sent.length - underWay)).flat()) {
			pending.wait();
			values[Symbol.dispose]();
		}
	}

	get #leaders(): Group {
		if (!this.groups.leaders) throw new Error("Only a lane's leader sends to other lanes.");
		return this.groups.leaders;
	}

	#place(rank: number): number {
		return this.#leaders.ranks.indexOf(rank);
	}
}

/** The encoder's end. */
export class BridgeSource {
	readonly #wire: Wire;
	/** Rows sent to each destination, oldest microbatch first. */
	readonly #outstanding: number[][] = [];
	readonly #destinations: readonly number[];
	readonly #fanIn: boolean;

	/** Called when this end begins (true) and ceases (false) to wait for the other module. */
	waits: (waiting: boolean) => void = () => {};

	constructor(
		device: Device,
		topology: Topology,
		rank: number,
		groups: BridgeGroups,
		width: number,
		dtype: FloatDtype,
	) {
		const lane = topology.encoder!.coordinates(rank).dp;
		this.#destinations = topology.routes
			.filter(({ source }) => source === lane)
			.map(({ destination }) => topology.destinationLeader(destination));
		this.#fanIn = topology.encoder!.lanes > topology.language.lanes;
		this.#wire = new Wire(device, groups, width, dtype, groups.lane.size - 1);
	}

	/** Starts sending the rows of one encoder microbatch; they may be released afterwards. returns: a gradient comes back. */
	sendForward({ rows, rowsPerSample }: ImageRows, returns = true): void {
		if (!this.#wire.leads) return;
		const per = this.#fanIn ? rowsPerSample.length : rowsPerSample.length / this.#destinations.length;
		const counts = sumRuns(rowsPerSample, per);
		let begin = 0;
		this.#wire.beginMicrobatch();
		this.#destinations.forEach((destination, index) => {
			this.#wire.sendCounts(rowsPerSample.slice(index * per, (index + 1) * per), destination);
			this.#wire.send(rows, begin, counts[index]!, destination);
			begin += counts[index]!;
		});
		if (returns) this.#outstanding.push(counts);
		else this.#waitFor(() => this.#wire.settle(microbatchesAhead));
	}

	/** Gradient of the rows of the oldest microbatch that has none yet, on every rank of the lane. */
	receiveBackward(rows: number): Tensor {
		return this.#waitFor(() => this.#receiveBackward(rows));
	}

	#waitFor<Result>(work: () => Result): Result {
		this.waits(true);
		try {
			return work();
		} finally {
			this.waits(false);
		}
	}

	#receiveBackward(rows: number): Tensor {
		if (!this.#wire.leads) return this.#wire.broadcast(null, 1).rows;
		const gradient = this.#wire.empty(rows);
		let begin = 0;
		this.#outstanding.shift()!.forEach((count, index) => {
			this.#wire.receive(gradient, begin, count, this.#destinations[index]!);
			begin += count;
		});
		// Where a gradient has come from, the rows have arrived; later ones may still wait for the language model.
		this.#wire.settle(this.#outstanding.length);
		return this.#wire.broadcast({ rows: gradient, rowsPerSample: [rows] }, 1).rows;
	}

	/** After the last microbatch: nothing is on the way any more. */
	settle(): void {
		this.#wire.settle();
	}
}

/** The language model's end. */
export class BridgeDestination {
	readonly #wire: Wire;
	readonly #sources: readonly number[];
	/** Rows that came from each source, oldest microbatch first. */
	readonly #received: number[][] = [];

	/** Called when this end begins (true) and ceases (false) to wait for the other module. */
	waits: (waiting: boolean) => void = () => {};

	constructor(
		device: Device,
		topology: Topology,
		rank: number,
		groups: BridgeGroups,
		width: number,
		dtype: FloatDtype,
	) {
		const lane = topology.language.coordinates(rank).dp;
		this.#sources = topology.routes
			.filter(({ destination }) => destination === lane)
			.map(({ source }) => topology.sourceLeader(source));
		this.#wire = new Wire(device, groups, width, dtype, 0);
	}

	/** Rows of the next microbatch of `samples` samples, on every rank of the lane. returns: their gradient goes back. */
	receiveForward(samples: number, returns = true): ImageRows {
		this.waits(true);
		try {
			return this.#receiveForward(samples, returns);
		} finally {
			this.waits(false);
		}
	}

	#receiveForward(samples: number, returns: boolean): ImageRows {
		if (!this.#wire.leads) return this.#wire.broadcast(null, samples);
		const perSource = this.#sources.map((source) => this.#wire.receiveCounts(samples / this.#sources.length, source));
		const counts = perSource.map((rows) => rows.reduce((sum, value) => sum + value, 0));
		const rows = this.#wire.empty(counts.reduce((sum, count) => sum + count, 0));
		let begin = 0;
		this.#sources.forEach((source, index) => {
			this.#wire.receive(rows, begin, counts[index]!, source);
			begin += counts[index]!;
		});
		if (returns) this.#received.push(counts);
		return this.#wire.broadcast({ rows, rowsPerSample: perSource.flat() }, samples);
	}

	/** Starts returning the gradient of the oldest microbatch's rows (null: none came, zeros). */
	sendBackward(gradient: Tensor | null): void {
		if (!this.#wire.leads) return;
		// An encoder that has sent the rows of this microbatch has taken the gradients of those before these.
		this.#wire.settle(microbatchesAhead);
		this.#wire.beginMicrobatch();
		const counts = this.#received.shift()!;
		const total = counts.reduce((sum, count) => sum + count, 0);
		using zeros = gradient ? null : Tensor.zeros(this.#wire.device, [total, this.#wire.width], this.#wire.dtype);
		using own = zeros ? null : this.#ownCopy(gradient!);
		let begin = 0;
		this.#sources.forEach((source, index) => {
			this.#wire.send(own ?? zeros!, begin, counts[index]!, source);
			begin += counts[index]!;
		});
	}

	settle(): void {
		this.#wire.settle();
	}

	/** The gradient in the wire's storage type; what is on the way must not change. */
	#ownCopy(gradient: Tensor): Tensor {
		const copy = this.#wire.empty(gradient.rows);
		copyInto(gradient, copy);
		return copy;
	}
}
