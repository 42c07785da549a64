/** The client of the rendezvous (server.ts): a rank joins at the server, or through the first rank of its machine. */
import * as v from "valibot";
import { messageOf, UserError } from "../../system/errors.ts";
import type { Place } from "../place.ts";
import {
	AuthenticatedConnection,
	type AuthenticationFailure,
	answerTime,
	protocol,
} from "./authenticated-connection.ts";
import { describeEndpoint, type Endpoint, LineConnection } from "./line-connection.ts";
import {
	type ConfigurationReply,
	type HostMemory,
	type HostReply,
	type HostRequest,
	type Identity,
	introductionOf,
	type LocalRanksMessage,
	serverMessageSchema,
} from "./messages.ts";

/** Milliseconds between attempts to connect. */
const retryInterval = 100;
/**
 * Milliseconds to wait for the server's greeting. `first`: in the first attempt; each further attempt waits twice as long, up to
 * `answerTime`, because the server's kernel drops some of many simultaneous connections, which look open on this side. `most`: in
 * all attempts together, because a program of another protocol that listens at the port may wait for this side to speak first.
 */
const greetingTimeout = { first: 1000, most: 3 * answerTime };

/** The server has refused the run; the message is the server's sentence, which all ranks receive. */
export class RefusedError extends UserError {}

/** Creates this host's shared memory. `addresses`: numeric, of the server (`host`) and of this side of the connection (`own`). */
export type CreateHostMemory = (
	wanted: HostRequest,
	addresses: { readonly host: string; readonly own: string },
) => HostMemory;

/**
 * Joins the rendezvous at `place`; resolves with the path of the run's shared memory when all ranks have joined. `createHostMemory` creates
 * this host's shared memory when the server requests it. The ranks of `localRanks` join through this rank. Throws UserErrors.
 */
export async function joinRendezvous(
	place: Place,
	identity: Identity,
	milliseconds: number,
	createHostMemory: CreateHostMemory,
	localRanks: LocalRanks | null = null,
): Promise<string> {
	try {
		const run = await joinServer(
			{ host: place.address, port: place.port },
			place.secret,
			identity,
			milliseconds,
			createHostMemory,
			localRanks,
		);
		localRanks?.announceRun(run);
		return run;
	} catch (error) {
		localRanks?.announceFailure(messageOf(error));
		throw error;
	}
}

/** The other ranks of this machine, which join through this rank. */
interface LocalRanks {
	/** Calls `send` with a message for the server whenever local ranks have joined or failed. */
	forwardTo(send: (message: LocalRanksMessage) => void): void;
	announceRun(run: string): void;
	announceFailure(reason: string): void;
}

/**
 * Joins through the first rank of this machine, at the abstract socket `path`; resolves with the path of the run's shared memory, or
 * with null if that rank is not found within `searchTime` milliseconds. Throws UserErrors.
 */
export async function joinLocalRendezvous(
	path: string,
	secret: string,
	identity: Identity,
	milliseconds: number,
	searchTime: number,
): Promise<string | null> {
	const end = performance.now() + searchTime;
	let connection: AuthenticatedConnection;
	try {
		connection = await connectAuthenticated({ path }, secret, end);
	} catch {
		return null;
	}
	using found = connection;
	return await exchangeMessages(found, describeEndpoint({ path }), identity, milliseconds, () => {
		throw new UserError("The first rank of this host requested shared memory from another rank of the host.");
	});
}

async function joinServer(
	endpoint: Endpoint,
	secret: string | null,
	identity: Identity,
	milliseconds: number,
	createHostMemory: CreateHostMemory,
	localRanks: LocalRanks | null,
): Promise<string> {
	const began = performance.now();
	using connection = await connectAuthenticated(endpoint, secret, began + milliseconds);
	const left = milliseconds - (performance.now() - began);
	return await exchangeMessages(connection, describeEndpoint(endpoint), identity, left, createHostMemory, localRanks);
}

/** Sends this rank's identity and answers the server's requests until it sends the path of the shared memory. */
async function exchangeMessages(
	connection: AuthenticatedConnection,
	where: string,
	identity: Identity,
	milliseconds: number,
	createHostMemory: CreateHostMemory,
	localRanks: LocalRanks | null = null,
): Promise<string> {
	const end = performance.now() + milliseconds;
	connection.send(introductionOf(identity));
	localRanks?.forwardTo((message) => connection.send(message));
	while (true) {
		const message = v.safeParse(serverMessageSchema, await connection.receive(end - performance.now()));
		if (!message.success) {
			throw new UserError(
				connection.closed
					? `The rendezvous at ${where} ended before all ranks had joined.`
					: `Not all ranks met at ${where} within ${Math.round(milliseconds / 1000)} s.`,
			);
		}
		if ("refused" in message.output) throw new RefusedError(message.output.refused);
		if ("run" in message.output) return message.output.run;
		if ("request" in message.output) {
			reply(connection, { configuration: identity.configuration });
			continue;
		}
		try {
			reply(
				connection,
				createHostMemory(message.output.createHostMemory, { host: connection.address, own: connection.localAddress }),
			);
		} catch (error) {
			reply(connection, { failed: messageOf(error) });
			throw error;
		}
	}
}

/** Connects and authenticates, with retries until `end`: unauthenticated connections of other processes may crowd this one out. */
export async function connectAuthenticated(
	endpoint: Endpoint,
	secret: string | null,
	end: number,
): Promise<AuthenticatedConnection> {
	const where = describeEndpoint(endpoint);
	for (let silentTime = 0, timeout = greetingTimeout.first, attempts = 1; ; attempts++) {
		const connection = await connectWithRetries(endpoint, end);
		const began = performance.now();
		const outcome = await AuthenticatedConnection.connect(connection, secret, timeout);
		if (outcome instanceof AuthenticatedConnection) return outcome;
		connection.drop();
		if (outcome.kind === "silent") {
			silentTime += performance.now() - began;
			timeout = Math.min(answerTime, 2 * timeout);
		} else if (outcome.kind !== "closed") throw new UserError(describeFailure(where, outcome));
		if (silentTime >= greetingTimeout.most) {
			throw new UserError(
				`The program that listens at ${where} sends nothing: it is not a rendezvous of mimo, or its host is overloaded; give another MASTER_PORT.`,
			);
		}
		if (performance.now() + retryInterval > end) {
			throw new UserError(
				`The rendezvous at ${where} did not accept this rank in ${attempts} attempts: connections of other processes keep it busy.`,
			);
		}
		await Bun.sleep(retryInterval);
	}
}

/** The message about a program that listens at the rendezvous address and is not this run's server. */
function describeFailure(where: string, failure: AuthenticationFailure): string {
	switch (failure.kind) {
		case "version":
			return `The rendezvous at ${where} speaks version ${failure.version} of the protocol, this rank version ${protocol}.`;
		case "refused":
			return `The rendezvous at ${where} refused the secret of this rank (MIMO_SECRET): it is not that of the run.`;
		case "secret":
			return `The rendezvous at ${where} does not have the secret of this run (MIMO_SECRET).`;
		case "owner":
			return `The rendezvous at ${where} and this rank do not belong to the same user, and the run has no secret (MIMO_SECRET).`;
		default:
			return `The program that listens at ${where} is not a rendezvous of mimo; give another MASTER_PORT.`;
	}
}

/** Tries to connect until the server listens, or until `end`. */
async function connectWithRetries(endpoint: Endpoint, end: number): Promise<LineConnection> {
	while (true) {
		try {
			return await LineConnection.open(endpoint, Math.max(1, Math.min(answerTime, end - performance.now())));
		} catch (error) {
			const code = (error as NodeJS.ErrnoException).code;
			if (performance.now() + retryInterval < end && code !== "ENOTFOUND") {
				await Bun.sleep(retryInterval);
				continue;
			}
			throw new UserError(
				`No process answers at ${describeEndpoint(endpoint)}, where the ranks should meet (${code}).`,
			);
		}
	}
}

function reply(connection: AuthenticatedConnection, answer: HostReply | ConfigurationReply): void {
	connection.send(answer);
}
