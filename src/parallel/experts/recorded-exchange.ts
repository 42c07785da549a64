/**
 * Records an exchange of rows as two tape records, start and finish: work queued between them hides the exchange, forward and
 * backward.
 */
import { type Tape, Tensor } from "../../tensor/index.ts";
import type { Pending, RowsOfMember } from "../group.ts";

/**
 * An exchange that has started. Backward starts the gradients' exchange at the record of the finish, and finishes it at the
 * record of the start.
 */
export interface StartedExchange extends Disposable {
	/** Waits for the rows and returns them. To be called once. */
	finish(): RowsOfMember;
}

/**
 * One direction of an exchange that has started: `end` waits for the rows and returns them. Source and destination stay allocated
 * until then.
 */
export interface Transfer extends Disposable {
	end(): RowsOfMember;
}

/** The rows and the values sent along, if any. */
export function parts({ rows, beside }: RowsOfMember): Tensor[] {
	return beside ? [rows, beside] : [rows];
}

/**
 * Starts `ways.out` and records the start; finish() records the finish. Both records keep `keep`, the tensors that `ways.back`
 * reads.
 */
export function recordExchange(
	tape: Tape,
	name: string,
	keep: readonly Tensor[],
	sent: RowsOfMember,
	ways: { readonly out: () => Transfer; readonly back: (gradients: RowsOfMember) => Transfer },
): StartedExchange {
	const wayOut = ways.out();
	let wayBack: Transfer | null = null;
	const leaving = parts(sent);
	// No operation reads the ticket; its gradient tells the first record that the gradients' exchange has started.
	using ticket = tape.output(Tensor.empty(tape.device, [1]), sent.rows.gradient !== null);
	const started = ticket.gradient;
	tape.record({
		name: `start ${name}`,
		outputs: [ticket],
		// The gradients' exchange ends in this record, at which the tape may be the only owner of these tensors.
		keep,
		own: [{ [Symbol.dispose]: () => wayBack?.[Symbol.dispose]() }],
		backward: () => {
			for (const [index, gradient] of parts(wayBack!.end()).entries()) leaving[index]!.gradient!.accumulate(gradient);
			wayBack = null;
		},
	});
	return {
		finish: () => {
			const come = parts(wayOut.end()).map((one, index) => tape.output(one, leaving[index]!.gradient !== null));
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
		[Symbol.dispose]: () => wayOut[Symbol.dispose](),
	};
}

function zeros(tape: Tape, { shape, dtype }: Pick<Tensor, "shape" | "dtype">): Tensor {
	return Tensor.zeros(tape.device, shape, dtype);
}

/** A transfer that owns the tensors `ends` until it ends or is disposed; `arrive` turns them into rows. */
export function transferOf(pending: readonly Pending[], ends: readonly Tensor[], arrive: () => RowsOfMember): Transfer {
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
