/**
 * The server of the rendezvous, through which the ranks of a run find each other over TCP. It runs in this program's launcher, else in
 * rank 0. Both sides of a connection first prove that they know the run's secret (authenticated-connection.ts). Each rank sends its
 * identity, which the server compares with its own; it requests the whole configuration only if the digests differ, to name the
 * keys that differ. In a run of several machines the first rank of each also registers the other ranks of its machine
 * (local-ranks.ts), so that rank 0 holds a connection a machine. When all ranks have joined, the first rank of every other
 * machine creates that machine's shared memory; then the server sends every rank the path of the shared memory on its machine.
 *
 *     rank → server   INTRODUCTION
 *     server → rank   REQUEST FOR CONFIGURATION       if the digests differ
 *     rank → server   CONFIGURATION                   the reply
 *     rank → server   LOCAL RANKS or LOCAL FAILURE    from the first rank of a machine, whenever its local ranks change
 *     server → rank   REQUEST FOR HOST MEMORY         to the first rank of another machine
 *     rank → server   HOST MEMORY or FAILURE          the reply
 *     server → rank   RUN or REFUSAL
 *
 * An unauthenticated connection is refused and has no effect on the run. An authenticated rank with another version, library or
 * configuration ends the run for all ranks.
 */
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import { type AuthenticatedConnection, AuthenticatedListener, answerTime } from "./authenticated-connection.ts";
import type { Endpoint } from "./line-connection.ts";
import {
	configurationReplySchema,
	describeIdentity,
	digestOf,
	type HostMemory,
	type HostReply,
	type HostRequest,
	type Identity,
	type Introduction,
	incompatibility,
	introductionSchema,
	rankMessageSchema,
	type ServerMessage,
} from "./messages.ts";

/** Milliseconds for another machine to create its shared memory and connect to its parent's relay. */
const hostTimeout = 30_000;
/** Milliseconds after a failure in which the server may still learn of the disconnected rank that caused it. */
const disconnectionDelay = 200;
/** The largest delay of a timer, in milliseconds: the wait ends when the rank sends a message or disconnects. */
const longestTimer = 2 ** 31 - 1;

interface Member {
	readonly identity: Identity;
	/** null: the rank is registered by the first rank of its machine. */
	readonly connection: AuthenticatedConnection | null;
	/** Takes the reply to a request for host memory; null: the rank has disconnected or sent something else. */
	onHostReply?: ((reply: HostReply | null) => void) | undefined;
	/** The rank has reported its failure, so that its disconnection is not reported as well. */
	reportedFailure?: boolean;
}

export class RendezvousServer implements Disposable {
	readonly #members = new Map<number, Member>();
	/** A sentence about the latest refused connection, for the message about absent ranks. */
	#lastRefusal: string | null = null;
	#failure: string | null = null;
	#disconnected: number | null = null;
	#changed: (() => void) | null = null;
	readonly #listeners: AuthenticatedListener[] = [];
	readonly #digest: string;

	private constructor(
		/** The identity with which every rank's is compared. */
		private readonly reference: Identity,
		private readonly secret: string | null,
	) {
		this.#digest = digestOf(reference.configuration);
	}

	/** `secret` null: processes of this user on this host may join. Throws a UserError that names a port in use. */
	static async open(
		address: string,
		port: number,
		secret: string | null,
		reference: Identity,
	): Promise<RendezvousServer> {
		const server = new RendezvousServer(reference, secret);
		try {
			await server.#listen({ host: address, port }, reference.worldSize);
		} catch (error) {
			throw new UserError(cannotListen(address, port, error as NodeJS.ErrnoException));
		}
		return server;
	}

	/**
	 * Opens the server of a machine's first rank, which up to `localRanks` other ranks of the machine join at the abstract socket
	 * `path`. `changed` is called when a rank has joined, and on a failure. Rejects with the system's error.
	 */
	static async openLocal(
		path: string,
		secret: string,
		reference: Identity,
		localRanks: number,
		changed: () => void,
	): Promise<RendezvousServer> {
		const server = new RendezvousServer(reference, secret);
		server.#changed = changed;
		await server.#listen({ path }, localRanks);
		return server;
	}

	/** Lets ranks of this machine also join at the abstract socket `path`. Rejects with the system's error. */
	async listenLocally(path: string, localRanks: number): Promise<void> {
		await this.#listen({ path }, localRanks);
	}

	async #listen(endpoint: Endpoint, expected: number): Promise<void> {
		const onRefused = (sentence: string) => {
			this.#lastRefusal = sentence;
		};
		const admit = (connection: AuthenticatedConnection) => void this.#admit(connection);
		this.#listeners.push(
			await AuthenticatedListener.open({ endpoint, secret: this.secret, expected, admit, onRefused }),
		);
	}

	/** Why the rendezvous has failed, as a sentence; null: it has not failed. */
	get failure(): string | null {
		return this.#failure;
	}

	/** The rank whose disconnection made waitForRanks() fail; null: no rank has disconnected. */
	get disconnected(): number | null {
		return this.#disconnected;
	}

	get port(): number {
		return this.#listeners[0]!.port;
	}

	/**
	 * Resolves when `ranks`, which are all ranks of the run but this process's own, have joined; from then on no connection is
	 * accepted. Throws a UserError that names the rank with another identity, or the ranks that are absent after `milliseconds`.
	 */
	async waitForRanks(ranks: readonly number[], milliseconds: number): Promise<void> {
		const end = performance.now() + milliseconds;
		while (true) {
			if (this.#failure !== null) this.#failAll(this.#failure);
			// #register accepts each expected rank once and no other, so comparing the counts is enough.
			if (this.#members.size === ranks.length) {
				for (const listener of this.#listeners) listener[Symbol.dispose]();
				return;
			}
			const left = end - performance.now();
			if (left <= 0) {
				const absent = ranks.filter((rank) => !this.#members.has(rank));
				const message = `${absent.length === 1 ? "Rank" : "Ranks"} ${absent.join(", ")} did not join within ${Math.round(milliseconds / 1000)} s.`;
				this.#failAll(this.#lastRefusal === null ? message : `${message} ${this.#lastRefusal}`);
			}
			await new Promise<void>((resolve) => {
				const timer = setTimeout(resolve, left);
				this.#changed = () => {
					clearTimeout(timer);
					resolve();
				};
			});
		}
	}

	/** Identities of the ranks that have joined, without this process. */
	get members(): ReadonlyMap<number, Identity> {
		return new Map([...this.#members].map(([rank, { identity }]) => [rank, identity]));
	}

	/**
	 * Has a machine's first rank create that machine's shared memory; resolves with its path and the address that the rank
	 * connects from. Throws a UserError. If any rank has disconnected meanwhile the error names that rank: its machine may be the
	 * parent, in the tree of hosts, that the rank could not connect to.
	 */
	async requestHostMemory(
		rank: number,
		createHostMemory: HostRequest,
	): Promise<HostMemory & { readonly address: string }> {
		const member = this.#members.get(rank)!;
		const { identity, connection } = member;
		if (connection === null)
			throw new UserError(
				`${describeIdentity(identity)} is registered by another rank, which would have to be requested.`,
			);
		const replied = new Promise<HostReply | null>((resolve) => {
			member.onHostReply = resolve;
		});
		send(connection, { createHostMemory });
		const late = setTimeout(() => member.onHostReply!(null), hostTimeout);
		const reply = await replied;
		clearTimeout(late);
		if (reply !== null && "run" in reply) return { ...reply, address: connection.from };
		await Bun.sleep(disconnectionDelay);
		const why = reply === null ? "It did not answer." : reply.failed;
		throw new UserError(
			this.#failure ?? `${describeIdentity(identity)} could not create the run's shared memory on its host: ${why}`,
		);
	}

	/** Sends every connected rank the path of the run's shared memory on its machine. */
	announceRun(run: string | ((rank: number) => string)): void {
		for (const [rank, { connection }] of this.#members)
			if (connection !== null) send(connection, { run: typeof run === "string" ? run : run(rank) });
	}

	/** Sends every connected rank the reason for the failure, a sentence. */
	announceFailure(reason: string): void {
		for (const { connection } of this.#members.values()) if (connection !== null) send(connection, { refused: reason });
	}

	/** Closes every connection; a pending waitForRanks() fails. */
	[Symbol.dispose](): void {
		this.#fail("The rendezvous was closed.");
		for (const { connection } of this.#members.values()) connection?.[Symbol.dispose]();
		for (const listener of this.#listeners) listener[Symbol.dispose]();
	}

	#failAll(reason: string): never {
		this.announceFailure(reason);
		throw new UserError(reason);
	}

	async #admit(connection: AuthenticatedConnection): Promise<void> {
		const introduction = v.safeParse(introductionSchema, await connection.receive(answerTime));
		if (introduction.success) {
			const identity = await this.#identify(introduction.output, connection);
			if (identity !== null) await this.#serve({ identity, connection });
			return;
		}
		send(connection, {
			refused: "The rendezvous cannot read the introduction of this rank, which is of another version.",
		});
		connection[Symbol.dispose]();
		this.#lastRefusal = `A process of another version wanted to join from ${connection.from} and was refused.`;
	}

	/** The rank's whole identity. If the rank does not send its configuration, the rendezvous fails and null is returned. */
	async #identify({ digest, ...about }: Introduction, connection: AuthenticatedConnection): Promise<Identity | null> {
		if (digest === this.#digest) return { ...about, configuration: this.reference.configuration };
		send(connection, { request: "configuration" });
		const end = performance.now() + answerTime;
		while (performance.now() < end && !connection.closed) {
			// Messages about local ranks may come first; they are dropped, since the configurations differ and the rendezvous fails.
			const message = v.safeParse(configurationReplySchema, await connection.receive(end - performance.now()));
			if (message.success) return { ...about, ...message.output };
		}
		const objection = `${describeIdentity(about)} has another configuration than ${describeIdentity(this.reference)}, and did not send it.`;
		send(connection, { refused: objection });
		connection[Symbol.dispose]();
		this.#fail(objection);
		return null;
	}

	/** Registers a rank, and handles its messages until it disconnects. */
	async #serve(member: Member & { readonly connection: AuthenticatedConnection }): Promise<void> {
		const { identity, connection } = member;
		const objection = this.#checkAndRegister(member);
		if (objection !== null) {
			send(connection, { refused: objection });
			return;
		}
		while (!connection.closed) {
			const message = v.safeParse(rankMessageSchema, await connection.receive(longestTimer));
			if (!message.success) {
				member.onHostReply?.(null);
				continue;
			}
			if ("failure" in message.output) {
				if (this.#failure === null) this.#disconnected = message.output.disconnected;
				this.#fail(message.output.failure);
			} else if ("localRanks" in message.output) {
				for (const about of message.output.localRanks)
					this.#register({ identity: { ...identity, ...about }, connection: null });
			} else {
				if ("failed" in message.output) member.reportedFailure = true;
				member.onHostReply?.(message.output);
			}
		}
		member.onHostReply?.(null);
		if (member.reportedFailure) return;
		if (this.#failure === null) this.#disconnected = identity.rank!;
		this.#fail(`${describeIdentity(identity)} disconnected before all ranks had joined.`);
	}

	/** Compares a rank's identity with this process's and registers the rank. Returns the incompatibility, which fails the rendezvous, or null. */
	#checkAndRegister(member: Member): string | null {
		const objection = incompatibility(member.identity, this.reference);
		if (objection === null) return this.#register(member);
		this.#fail(objection);
		return objection;
	}

	/** Registers a rank whose identity is this process's, as compared here or by the first rank of its machine. Returns a sentence or null as #checkAndRegister does. */
	#register(member: Member): string | null {
		const { rank } = member.identity;
		const known = this.#members.get(rank ?? -1);
		const expected = rank !== null && rank < this.reference.worldSize && rank !== this.reference.rank;
		if (expected && known === undefined) {
			this.#members.set(rank, member);
			this.#changed?.();
			return null;
		}
		const objection = expected
			? `${describeIdentity(member.identity)} and ${describeIdentity(known!.identity)} are the same rank.`
			: `${describeIdentity(member.identity)} is not expected by ${describeIdentity(this.reference)}.`;
		this.#fail(objection);
		return objection;
	}

	#fail(reason: string): void {
		this.#failure ??= reason;
		this.#changed?.();
	}
}

function send(connection: AuthenticatedConnection, answer: ServerMessage): void {
	connection.send(answer);
}

function cannotListen(address: string, port: number, { code, message }: NodeJS.ErrnoException): string {
	switch (code) {
		case "EADDRINUSE":
			return `Port ${port} of ${address}, where the ranks should meet, is in use by another program; give another MASTER_PORT.`;
		case "EADDRNOTAVAIL":
		case "ENOTFOUND":
			return `MASTER_ADDR ${address} is not an address of this host, where rank 0 runs.`;
		case "EACCES":
			return `Port ${port} of ${address}, where the ranks should meet, may not be used; give another MASTER_PORT.`;
		default:
			return `The ranks cannot meet at ${address}:${port} (${code ?? message}).`;
	}
}
