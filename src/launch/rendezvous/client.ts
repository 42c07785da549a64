/** A rank meets its host, or the first rank of its machine, which speaks for it (server.ts). */
import * as v from "valibot";
import { UserError } from "../../native/errors.ts";
import type { Place } from "../place.ts";
import { type Identity, introductionOf } from "./identity.ts";
import { describeSpot, LineConnection, type Spot } from "./line-connection.ts";
import { answerSchema, type Lead, type Led, type Part, type Told, type Word } from "./messages.ts";
import { answerTime, type Failure, ProvenConnection, protocol } from "./proven-connection.ts";

/** Milliseconds. */
const retryInterval = 100;
/**
 * Time until the host's first word. `first`: in the first attempt; every further attempt waits twice as long, up to `answerTime`,
 * because the host's kernel drops some of many connections that come at once, and these look open here. `most`: in all attempts
 * together, because another program that listens at the port may wait for our first word.
 */
const silence = { first: 1000, most: 3 * answerTime };

/** The run is refused: the host's sentence, which all ranks receive. */
export class RefusedError extends UserError {}

/** Makes this host's part of the run, at the numeric addresses of the host and of this side. */
export type MakePart = (wanted: Lead, addresses: { readonly host: string; readonly own: string }) => Part;

/**
 * Meets the host; resolves with the path of the run's shared memory when all ranks are there. Asked to, it makes its host's part
 * with `lead`, which is told the numeric addresses of the host and of this side. Throws UserErrors.
 */
export async function meet(
	place: Place,
	identity: Identity,
	milliseconds: number,
	lead: MakePart,
	neighbours: Neighbours | null = null,
): Promise<string> {
	try {
		const run = await meetAt(
			{ host: place.address, port: place.port },
			place.secret,
			identity,
			milliseconds,
			lead,
			neighbours,
		);
		neighbours?.welcome(run);
		return run;
	} catch (error) {
		neighbours?.refuse((error as Error).message);
		throw error;
	}
}

/** Ranks of this machine for which this one speaks. */
interface Neighbours {
	/** Tells the host of them as they come. */
	tell(say: (word: Word) => void): void;
	welcome(run: string): void;
	refuse(reason: string): void;
}

/**
 * Meets the first rank of this machine, which speaks for this one; resolves with the path of the run's shared memory, or with null
 * where no such rank is found within `patience` milliseconds. Throws UserErrors.
 */
export async function meetNeighbour(
	path: string,
	secret: string,
	identity: Identity,
	milliseconds: number,
	patience: number,
): Promise<string | null> {
	const end = performance.now() + patience;
	let connection: ProvenConnection;
	try {
		connection = await prove({ path }, secret, end);
	} catch {
		return null;
	}
	using found = connection;
	return await converse(found, describeSpot({ path }), identity, milliseconds, () => {
		throw new UserError("The first rank of this host asks another one to make the host's part of the run.");
	});
}

async function meetAt(
	spot: Spot,
	secret: string | null,
	identity: Identity,
	milliseconds: number,
	lead: MakePart,
	neighbours: Neighbours | null,
): Promise<string> {
	const began = performance.now();
	using connection = await prove(spot, secret, began + milliseconds);
	const left = milliseconds - (performance.now() - began);
	return await converse(connection, describeSpot(spot), identity, left, lead, neighbours);
}

/** Sends this rank's identity, and follows the host's requests. */
async function converse(
	connection: ProvenConnection,
	where: string,
	identity: Identity,
	milliseconds: number,
	lead: MakePart,
	neighbours: Neighbours | null = null,
): Promise<string> {
	const end = performance.now() + milliseconds;
	connection.send(introductionOf(identity));
	neighbours?.tell((word) => connection.send(word));
	while (true) {
		const answer = v.safeParse(answerSchema, await connection.receive(end - performance.now()));
		if (!answer.success) {
			throw new UserError(
				connection.closed
					? `The rendezvous at ${where} ended before all ranks had joined.`
					: `Not all ranks met at ${where} within ${Math.round(milliseconds / 1000)} s.`,
			);
		}
		if ("refused" in answer.output) throw new RefusedError(answer.output.refused);
		if ("run" in answer.output) return answer.output.run;
		if ("tell" in answer.output) {
			reply(connection, { configuration: identity.configuration });
			continue;
		}
		try {
			reply(connection, lead(answer.output.lead, { host: connection.address, own: connection.localAddress }));
		} catch (error) {
			reply(connection, { failed: (error as Error).message });
			throw error;
		}
	}
}

/** Tries until the host takes this rank in: strangers may crowd it out for a while. */
async function prove(spot: Spot, secret: string | null, end: number): Promise<ProvenConnection> {
	const where = describeSpot(spot);
	for (let silent = 0, patience = silence.first, attempts = 1; ; attempts++) {
		const connection = await reach(spot, end);
		const began = performance.now();
		const outcome = await ProvenConnection.introduce(connection, secret, patience);
		if (outcome instanceof ProvenConnection) return outcome;
		connection.drop();
		if (outcome.kind === "silent") {
			silent += performance.now() - began;
			patience = Math.min(answerTime, 2 * patience);
		} else if (outcome.kind !== "gone") throw new UserError(notOurs(where, outcome));
		if (silent >= silence.most) {
			throw new UserError(
				`What listens at ${where} says nothing: it is no rendezvous of mimo, or its host is overloaded; give another MASTER_PORT.`,
			);
		}
		if (performance.now() + retryInterval > end) {
			throw new UserError(
				`The rendezvous at ${where} has not taken this rank in, in ${attempts} attempts: others connect there all the time and keep it busy.`,
			);
		}
		await Bun.sleep(retryInterval);
	}
}

/** Describes the program that listens where the ranks should meet and is no host of this run. */
function notOurs(where: string, failure: Failure): string {
	switch (failure.kind) {
		case "version":
			return `The rendezvous at ${where} is of another version (${failure.version}, here ${protocol}).`;
		case "refused":
			return "This process has not the secret of the run (MIMO_SECRET) that meets here.";
		case "secret":
			return `The rendezvous at ${where} has not the secret of this run (MIMO_SECRET).`;
		case "owner":
			return `The rendezvous at ${where} and this rank do not belong to the same user, and the run has no secret (MIMO_SECRET).`;
		default:
			return `What listens at ${where} is no rendezvous of mimo; give another MASTER_PORT.`;
	}
}

/** Tries until the host is there. */
async function reach(spot: Spot, end: number): Promise<LineConnection> {
	while (true) {
		try {
			return await LineConnection.open(spot, Math.max(1, Math.min(answerTime, end - performance.now())));
		} catch (error) {
			const code = (error as NodeJS.ErrnoException).code;
			if (performance.now() + retryInterval < end && code !== "ENOTFOUND") {
				await Bun.sleep(retryInterval);
				continue;
			}
			throw new UserError(`Nobody answers at ${describeSpot(spot)}, where the ranks should meet (${code}).`);
		}
	}
}

function reply(connection: ProvenConnection, answer: Led | Told): void {
	connection.send(answer);
}
