/**
 * A connection whose two sides have authenticated: each has proved that it knows the run's secret. Every message then carries an
 * HMAC of its sequence number and body, under a key of this connection and direction; a message that is altered, repeated,
 * left out or sent back ends the connection. Nothing is encrypted.
 *
 *     server → client {"program": "mimo", "protocol": 4, "challenge": HEX}
 *     client → server {"challenge": HEX, "proof": HMAC of both challenges}
 *     server → client {"proof": HMAC of both challenges}, or {"refused": REASON}
 *     either        {"body": JSON, "tag": HMAC}
 */

import { createHmac, randomBytes, timingSafeEqual } from "node:crypto";
import type { Server } from "node:net";
import * as v from "valibot";
import { type Endpoint, type LineConnection, listen } from "./line-connection.ts";

const program = "mimo";
export const protocol = 4;
/** Milliseconds in which each side has to answer. */
export const answerTime = 10_000;

const hash = v.pipe(v.string(), v.hexadecimal(), v.length(64));
const greetingSchema = v.object({ program: v.literal(program), protocol: v.number(), challenge: v.unknown() });
const proofSchema = v.strictObject({ challenge: hash, proof: hash });
const answerSchema = v.union([
	v.strictObject({ proof: hash }),
	v.strictObject({ refused: v.picklist(["secret", "owner"]) }),
]);
const messageSchema = v.strictObject({ body: v.string(), tag: hash });

type Role = "server" | "client";

/** Why the server refuses a client: the rest of a sentence that begins with "A process at ADDRESS". */
export type Refusal = "did not speak the rendezvous protocol" | "had another secret" | "belonged to another user";

/**
 * Why a client does not accept a server. `version`: another version of the protocol; `protocol`: another protocol; `closed`: the
 * server closed the connection; `silent`: it sent nothing; `secret`: it does not know the secret; `refused`: it refused this side's
 * secret; `owner`: the processes belong to different users.
 */
export type AuthenticationFailure =
	| { readonly kind: "protocol" | "closed" | "silent" | "secret" | "refused" | "owner" }
	| { readonly kind: "version"; readonly version: number };

/** Keys and proofs that both sides of a connection derive from the secret. */
class Keys {
	constructor(
		private readonly secret: string | null,
		private readonly serverChallenge: string,
		private readonly clientChallenge: string,
	) {}

	derive(purpose: "proof" | "key", side: Role): Buffer {
		const text = [program, protocol, purpose, side, this.serverChallenge, this.clientChallenge].join("\n");
		return createHmac("sha256", this.secret ?? "")
			.update(text)
			.digest();
	}

	proof(side: Role): string {
		return this.derive("proof", side).toString("hex");
	}
}

function equal(a: string, b: string): boolean {
	const [left, right] = [Buffer.from(a), Buffer.from(b)];
	return left.length === right.length && timingSafeEqual(left, right);
}

function parse(text: string | undefined): unknown {
	try {
		return text === undefined ? undefined : JSON.parse(text);
	} catch {
		return undefined;
	}
}

export class AuthenticatedConnection implements Disposable {
	readonly #keys: { readonly own: Buffer; readonly other: Buffer };
	#sent = 0;
	#received = 0;

	private constructor(
		private readonly connection: LineConnection,
		keys: Keys,
		own: Role,
	) {
		connection.raiseLineLimit();
		this.#keys = { own: keys.derive("key", own), other: keys.derive("key", own === "server" ? "client" : "server") };
	}

	/**
	 * The server's side: resolves with the connection when the client has proved the secret, else with the reason for the refusal. `secret` null: the client must be a
	 * process of this user on this host.
	 */
	static async accept(connection: LineConnection, secret: string | null): Promise<AuthenticatedConnection | Refusal> {
		const send = (value: unknown) => connection.send(JSON.stringify(value));
		// Before the greeting: a process that answers it must not have closed its socket, which then has no owner, before the search.
		const isOwn = secret !== null || (await connection.isOwnUser());
		if (connection.closed) return "did not speak the rendezvous protocol";
		const serverChallenge = randomBytes(32).toString("hex");
		send({ program, protocol, challenge: serverChallenge });
		if (!isOwn) {
			send({ refused: "owner" });
			return "belonged to another user";
		}
		const proof = v.safeParse(proofSchema, parse(await connection.receive(answerTime)));
		if (!proof.success) return "did not speak the rendezvous protocol";
		const keys = new Keys(secret, serverChallenge, proof.output.challenge);
		if (!equal(keys.proof("client"), proof.output.proof)) {
			send({ refused: "secret" });
			return "had another secret";
		}
		send({ proof: keys.proof("server") });
		return new AuthenticatedConnection(connection, keys, "server");
	}

	/**
	 * The client's side: resolves with the connection when both sides have proved the secret, else with the reason why the server is
	 * not accepted. `greetingTimeout`: milliseconds to wait for the greeting.
	 */
	static async connect(
		connection: LineConnection,
		secret: string | null,
		greetingTimeout = answerTime,
	): Promise<AuthenticatedConnection | AuthenticationFailure> {
		const first = await connection.receive(greetingTimeout);
		if (first === undefined) return { kind: connection.closed ? "closed" : "silent" };
		const greeting = v.safeParse(greetingSchema, parse(first));
		if (!greeting.success) return { kind: "protocol" };
		const { protocol: version, challenge } = greeting.output;
		if (version !== protocol) return { kind: "version", version };
		if (!v.is(hash, challenge)) return { kind: "protocol" };
		// The server's socket has an owner in the kernel's tables only once it has been accepted, which the greeting shows.
		if (secret === null && !(await connection.isOwnUser())) return { kind: "owner" };
		const own = randomBytes(32).toString("hex");
		const keys = new Keys(secret, challenge, own);
		connection.send(JSON.stringify({ challenge: own, proof: keys.proof("client") }));
		const second = await connection.receive(answerTime);
		if (second === undefined) return { kind: connection.closed ? "closed" : "silent" };
		const answer = v.safeParse(answerSchema, parse(second));
		if (!answer.success) return { kind: "secret" };
		if ("refused" in answer.output) return { kind: answer.output.refused === "owner" ? "owner" : "refused" };
		if (!equal(keys.proof("server"), answer.output.proof)) return { kind: "secret" };
		return new AuthenticatedConnection(connection, keys, "client");
	}

	get from(): string {
		return this.connection.from;
	}

	get address(): string {
		return this.connection.address;
	}

	get localAddress(): string {
		return this.connection.localAddress;
	}

	get closed(): boolean {
		return this.connection.closed;
	}

	send(value: unknown): void {
		const body = JSON.stringify(value);
		this.connection.send(JSON.stringify({ body, tag: tagOf(this.#keys.own, this.#sent++, body) }));
	}

	/** The next value; undefined if none arrives in time or the connection ends, as it does at a wrong tag. */
	async receive(milliseconds: number): Promise<unknown> {
		const line = await this.connection.receive(milliseconds);
		if (line === undefined) return undefined;
		const message = v.safeParse(messageSchema, parse(line));
		if (message.success) {
			const { body, tag } = message.output;
			if (equal(tagOf(this.#keys.other, this.#received++, body), tag)) return parse(body);
		}
		this.connection.drop();
		await this.connection.ended();
		return undefined;
	}

	ended(): Promise<void> {
		return this.connection.ended();
	}

	/** Closes the connection: sent messages still arrive. */
	[Symbol.dispose](): void {
		this.connection[Symbol.dispose]();
	}
}

function tagOf(key: Buffer, number: number, body: string): string {
	return createHmac("sha256", key).update(`${number}\n${body}`).digest("hex");
}

// A listening socket that passes on authenticated connections. Any process may connect: the number of unauthenticated
// connections, the length of their lines and their time to authenticate are bounded.

interface AuthenticatedListenerOptions {
	readonly endpoint: Endpoint;
	/** null: no secret; processes of this user on this host are accepted. */
	readonly secret: string | null;
	/** Processes of the run that may connect at once; `placesForUnproven` more unproven connections are held. */
	readonly expected: number;
	readonly admit: (connection: AuthenticatedConnection) => void;
	/** Called with a sentence about a connection that was refused. */
	readonly onRefused?: (sentence: string) => void;
}

const placesForUnauthenticated = 64;

export class AuthenticatedListener implements Disposable {
	/** Unauthenticated connections, the oldest first. */
	readonly #unauthenticated = new Set<LineConnection>();
	#server: Server | null = null;
	#port = 0;

	private constructor(private readonly options: AuthenticatedListenerOptions) {}

	/** Rejects with the system's error. */
	static async open(options: AuthenticatedListenerOptions): Promise<AuthenticatedListener> {
		const listener = new AuthenticatedListener(options);
		const opened = await listen(options.endpoint, (connection) => void listener.#authenticate(connection));
		listener.#server = opened.server;
		listener.#port = opened.port;
		return listener;
	}

	get port(): number {
		return this.#port;
	}

	/** Stops listening and drops the unauthenticated connections; admitted connections stay open. */
	[Symbol.dispose](): void {
		this.#server?.close();
		this.#server?.unref();
		this.#server = null;
		for (const connection of this.#unauthenticated) connection.drop();
	}

	async #authenticate(connection: LineConnection): Promise<void> {
		if (this.#unauthenticated.size >= placesForUnauthenticated + this.options.expected) this.#dropOldest();
		this.#unauthenticated.add(connection);
		// A refused connection keeps its place until it is closed, so that reconnecting at once gains nothing.
		void connection.ended().then(() => this.#unauthenticated.delete(connection));
		const outcome = await AuthenticatedConnection.accept(connection, this.options.secret);
		if (typeof outcome === "string") {
			connection[Symbol.dispose]();
			this.options.onRefused?.(`A process at ${connection.from} ${outcome} and was refused.`);
			return;
		}
		this.#unauthenticated.delete(connection);
		if (this.#server === null) outcome[Symbol.dispose]();
		else this.options.admit(outcome);
	}

	/** Drops the oldest unauthenticated connection, which has had the most time to prove the secret. */
	#dropOldest(): void {
		const [oldest] = this.#unauthenticated;
		this.#unauthenticated.delete(oldest!);
		oldest!.drop();
	}
}
