/**
 * The all-gather token dispatcher's exchange: gathers all members' rows at every member, and reduce-scatters the partial outputs.
 * It sends the fewest bytes if the group is smaller than top-k, and needs no row counts from the device.
 */
import { contiguous, copyInto, type Tape, Tensor } from "../../tensor/index.ts";
import type { Group, RowsOfMember } from "../group.ts";
import { parts, recordExchange, type StartedExchange, type Transfer, transferOf } from "./recorded-exchange.ts";

/** The members' rows are concatenated, padded to `rows` each, the most that any member has. */
export interface Gathering {
	readonly group: Group;
	readonly rows: number;
}

/**
 * Starts gathering the members' rows and the values sent along, in the order of the members; padding rows are -1. Backward: the
 * sum of all members' gradients of this member's rows.
 */
export function startGather(tape: Tape, sent: RowsOfMember, gathering: Gathering): StartedExchange {
	return recordExchange(tape, "gather rows", [], sent, {
		out: () => gathered(sent, gathering),
		back: (gradients) => summed(gradients, sent.rows.rows, gathering),
	});
}

/**
 * Starts the reduction of all members' partial outputs; this member receives the sum of its `own` rows. Backward: every member
 * receives all gradients.
 */
export function startSum(tape: Tape, partial: Tensor, own: number, gathering: Gathering): StartedExchange {
	const sent = { rows: partial, beside: null };
	return recordExchange(tape, "sum rows", [], sent, {
		out: () => summed(sent, own, gathering),
		back: (gradients) => gathered(gradients, gathering),
	});
}

function gathered(sent: RowsOfMember, gathering: Gathering): Transfer {
	const { group } = gathering;
	const moves = parts(sent).map((part) => {
		const all = Tensor.empty(part.device, [group.size * gathering.rows, part.width], part.dtype);
		const own = ownPlace(all, part, gathering);
		return { own, all, pending: group.allGather(own, all) };
	});
	const ends = moves.flatMap(({ own, all }) => [own, all]);
	return transferOf(
		moves.map(({ pending }) => pending),
		ends,
		() => ({ rows: moves[0]!.all.share(), beside: moves[1]?.all.share() ?? null }),
	);
}

/**
 * Copies this member's rows to their place among all rows: the sent rows may be freed before other members have received them.
 */
function ownPlace(all: Tensor, part: Tensor, { group, rows }: Gathering): Tensor {
	const first = group.rank * rows;
	using filled = all.rowsFrom(first, part.rows);
	copyInto(part, filled);
	if (part.rows < rows) {
		using missing = all.rowsFrom(first + part.rows, rows - part.rows);
		all.device.run("fill", { y: missing, elements: missing.elements, value: -1, dtype: missing.dtypeCode });
	}
	return all.rowsFrom(first, rows);
}

function summed(partial: RowsOfMember, own: number, { group, rows }: Gathering): Transfer {
	const moves = parts(partial).map((part) => {
		const sum = Tensor.empty(part.device, [rows, part.width], part.dtype);
		const whole = contiguous(part);
		return { whole, sum, pending: group.reduceScatter(whole, sum) };
	});
	const ends = moves.flatMap(({ whole, sum }) => [whole, sum]);
	return transferOf(
		moves.map(({ pending }) => pending),
		ends,
		() => ({ rows: moves[0]!.sum.rowsFrom(0, own), beside: moves[1]?.sum.rowsFrom(0, own) ?? null }),
	);
}
