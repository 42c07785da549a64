/** The client of the rendezvous (server.ts): a rank joins at the server, or through the first rank of its machine. */
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import type { Place } from "../place.ts";
import { type Identity, introductionOf } from "./identity.ts";
import { describeSpot, LineConnection, type Spot } from "./line-connection.ts";
import { answerSchema, type Lead, type Led, type LocalRanksMessage, type Part, type Told } from "./messages.ts";
import { answerTime, type Failure, ProvenConnection, protocol } from "./proven-connection.ts";

/** Milliseconds between attempts to connect. */
const retryInterval = 100;
/**
 * Milliseconds to wait for the server's greeting. `first`: in the first attempt; each further attempt waits twice as long, up to
 * `answerTime`, because the server's kernel drops some of many simultaneous connections, which look open on this side. `most`: in
 * all attempts together, because a program of another protocol that listens at the port may wait for this side to speak first.
 */
const silence = { first: 1000, most: 3 * answerTime };

/** The server has refused the run; the message is the server's sentence, which all ranks receive. */
export class RefusedError extends UserError {}

/** Creates this host's shared memory. `addresses`: numeric, of the server (`host`) and of this side of the connection (`own`). */
export type MakePart = (wanted: Lead, addresses: { readonly host: string; readonly own: string }) => Part;

/**
 * Joins the rendezvous at `place`; resolves with the path of the run's shared memory when all ranks have joined. `lead` creates
 * this host's shared memory when the server requests it. `localRanks` joins through this rank. Throws UserErrors.
 */
export async function joinRendezvous(
	place: Place,
	identity: Identity,
	milliseconds: number,
	lead: MakePart,
	localRanks: LocalRanks | null = null,
): Promise<string> {
	try {
		const run = await joinAt(
			{ host: place.address, port: place.port },
			place.secret,
			identity,
			milliseconds,
			lead,
			localRanks,
		);
		localRanks?.welcome(run);
		return run;
	} catch (error) {
		localRanks?.refuse((error as Error).message);
		throw error;
	}
}

/** The other ranks of this machine, which join through this rank. */
interface LocalRanks {
	/** Calls `say` with a message to the server whenever ranks have joined or failed. */
	tell(say: (word: LocalRanksMessage) => void): void;
	welcome(run: string): void;
	refuse(reason: string): void;
}

/**
 * Joins through the first rank of this machine, at the abstract socket `path`; resolves with the path of the run's shared memory, or
 * with null if that rank is not found within `patience` milliseconds. Throws UserErrors.
 */
export async function joinLocalRendezvous(
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

async function joinAt(
	spot: Spot,
	secret: string | null,
	identity: Identity,
	milliseconds: number,
	lead: MakePart,
	localRanks: LocalRanks | null,
): Promise<string> {
	const began = performance.now();
	using connection = await prove(spot, secret, began + milliseconds);
	const left = milliseconds - (performance.now() - began);
	return await converse(connection, describeSpot(spot), identity, left, lead, localRanks);
}

/** Sends this rank's identity and answers the server's requests until it sends the path of the shared memory. */
async function converse(
	connection: ProvenConnection,
	where: string,
	identity: Identity,
	milliseconds: number,
	lead: MakePart,
	localRanks: LocalRanks | null = null,
): Promise<string> {
	const end = performance.now() + milliseconds;
	connection.send(introductionOf(identity));
	localRanks?.tell((word) => connection.send(word));
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

/** Connects and proves the secret, again and again until `end`: unproven connections of others may crowd this one out for a while. */
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
				`The program that listens at ${where} sends nothing: it is no rendezvous of mimo, or its host is overloaded; give another MASTER_PORT.`,
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

/** The error about a program that listens where the ranks should meet and is not this run's server. */
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
			return `The program that listens at ${where} is no rendezvous of mimo; give another MASTER_PORT.`;
	}
}

/** Tries to connect until the server listens, or until `end`. */
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
			throw new UserError(`No process answers at ${describeSpot(spot)}, where the ranks should meet (${code}).`);
		}
	}
}

function reply(connection: ProvenConnection, answer: Led | Told): void {
	connection.send(answer);
}
