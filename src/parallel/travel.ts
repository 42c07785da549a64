/**
 * Rows that travel between ranks as records of a tape: what is queued between start and finish hides the time that they take,
 * forward and backward.
 */
import type { Tape } from "../tensor/tape.ts";
import { Tensor } from "../tensor/tensor.ts";
import type { Pending, RowsOfMember } from "./group.ts";

/**
 * Rows on their way to other ranks. Work queued between start and finish hides the time that they take. In backward their
 * gradients start where the rows finished, and finish where the rows started.
 */
export interface Travelling extends Disposable {
	/** The rows that have come. Called once. */
	finish(): RowsOfMember;
}

/** A started way: `end` waits for the rows and returns them. Both ends stay allocated until then. */
export interface Journey extends Disposable {
	end(): RowsOfMember;
}

export function parts({ rows, beside }: RowsOfMember): Tensor[] {
	return beside ? [rows, beside] : [rows];
}

/** A journey as two records of the tape, which keep `keep`; the second is made by finish. */
export function travel(
	tape: Tape,
	name: string,
	keep: readonly Tensor[],
	sent: RowsOfMember,
	ways: { readonly out: () => Journey; readonly back: (gradients: RowsOfMember) => Journey },
): Travelling {
	const journey = ways.out();
	let wayBack: Journey | null = null;
	const leaving = parts(sent);
	// No operation reads the ticket: its gradient tells the first record that the way back has started.
	using ticket = tape.output(Tensor.empty(tape.device, [1]), sent.rows.gradient !== null);
	const started = ticket.gradient;
	tape.record({
		name: `start ${name}`,
		outputs: [ticket],
		// The way back ends here, and no other holder of the rows' destination may be left.
		keep,
		own: [{ [Symbol.dispose]: () => wayBack?.[Symbol.dispose]() }],
		backward: () => {
			for (const [index, gradient] of parts(wayBack!.end()).entries()) leaving[index]!.gradient!.accumulate(gradient);
			wayBack = null;
		},
	});
	return {
		finish: () => {
			const come = parts(journey.end()).map((one, index) => tape.output(one, leaving[index]!.gradient !== null));
			const shapes = come.map(({ shape, dtype }) => ({ shape, dtype }));
			tape.record({
				name,
				outputs: come,
				keep,
				backward: (gradients) => {
					const [rows, beside] = gradients.map((gradient, index) => gradient?.share() ?? zeros(tape, shapes[index]!));
					const returning = { rows: rows!, beside: beside ?? null };
					wayBack = ways.back(returning);
					for (const one of parts(returning)) one[Symbol.dispose]();
					started!.accumulate(Tensor.empty(tape.device, [1]));
				},
			});
			return { rows: come[0]!, beside: come[1] ?? null };
		},
		[Symbol.dispose]: () => journey[Symbol.dispose](),
	};
}

function zeros(tape: Tape, { shape, dtype }: Pick<Tensor, "shape" | "dtype">): Tensor {
	return Tensor.zeros(tape.device, shape, dtype);
}

/** A journey that holds `ends` until it has ended, or is given up. */
export function journeyOf(pending: readonly Pending[], ends: readonly Tensor[], arrive: () => RowsOfMember): Journey {
	let under = true;
	const release = () => {
		if (under) for (const end of ends) end[Symbol.dispose]();
		under = false;
	};
	return {
		end: () => {
			for (const one of pending) one.wait();
			const come = arrive();
			release();
			return come;
		},
		[Symbol.dispose]: release,
	};
}
