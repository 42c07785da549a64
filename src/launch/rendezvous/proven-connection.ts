/**
 * A connection whose two sides have proved to each other that they know the run's secret. Every message then carries a tag: an
 * HMAC, under a key of this connection and direction, of how many came before it and of its body; so a message that is
 * altered, repeated, left out or sent back ends the connection. Nothing is encrypted.
 *
 *     server → client {"program": "mimo", "protocol": 3, "challenge": HEX}
 *     client → server {"challenge": HEX, "proof": HMAC of both challenges}
 *     server → client {"proof": HMAC of both challenges}, or {"refused": REASON}
 *     either        {"body": JSON, "tag": HMAC}
 */
import { createHmac, randomBytes, timingSafeEqual } from "node:crypto";
import * as v from "valibot";
import type { LineConnection } from "./line-connection.ts";

const program = "mimo";
export const protocol = 3;
/** Milliseconds in which each side has to answer. */
export const answerTime = 10_000;

const hash = v.pipe(v.string(), v.hexadecimal(), v.length(64));
const greetingSchema = v.object({ program: v.literal(program), protocol: v.number(), challenge: v.unknown() });
const helloSchema = v.strictObject({ challenge: hash, proof: hash });
const answerSchema = v.union([
	v.strictObject({ proof: hash }),
	v.strictObject({ refused: v.picklist(["secret", "owner"]) }),
]);
const messageSchema = v.strictObject({ body: v.string(), tag: hash });

type Side = "server" | "client";

/** Why the server refuses a client, as the end of "A process at ADDRESS ...". */
export type Refusal = "did not speak the rendezvous protocol" | "had another secret" | "belonged to another user";

/**
 * Why the server is not this run's. `version`: it speaks another protocol; `gone`: it closed the connection; `silent`: it
 * sent nothing.
 */
export type Failure =
	| { readonly kind: "stranger" | "gone" | "silent" | "secret" | "refused" | "owner" }
	| { readonly kind: "version"; readonly version: number };

/** Keys and proofs that both sides of a connection derive from the secret. */
class Keys {
	constructor(
		private readonly secret: string | null,
		private readonly serverChallenge: string,
		private readonly clientChallenge: string,
	) {}

	derive(purpose: "proof" | "key", side: Side): Buffer {
		const text = [program, protocol, purpose, side, this.serverChallenge, this.clientChallenge].join("\n");
		return createHmac("sha256", this.secret ?? "")
			.update(text)
			.digest();
	}

	proof(side: Side): string {
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

export class ProvenConnection implements Disposable {
	readonly #keys: { readonly own: Buffer; readonly other: Buffer };
	#sent = 0;
	#received = 0;

	private constructor(
		private readonly connection: LineConnection,
		keys: Keys,
		own: Side,
	) {
		connection.trust();
		this.#keys = { own: keys.derive("key", own), other: keys.derive("key", own === "server" ? "client" : "server") };
	}

	/**
	 * The server's side: resolves when the client has proved the secret, or with the reason why not. `secret` null: the client must be a
	 * process of this user on this host.
	 */
	static async welcome(connection: LineConnection, secret: string | null): Promise<ProvenConnection | Refusal> {
		const say = (value: unknown) => connection.send(JSON.stringify(value));
		const serverChallenge = randomBytes(32).toString("hex");
		say({ program, protocol, challenge: serverChallenge });
		if (secret === null && !connection.isOwnUser()) {
			say({ refused: "owner" });
			return "belonged to another user";
		}
		const hello = v.safeParse(helloSchema, parse(await connection.receive(answerTime)));
		if (!hello.success) return "did not speak the rendezvous protocol";
		const keys = new Keys(secret, serverChallenge, hello.output.challenge);
		if (!equal(keys.proof("client"), hello.output.proof)) {
			say({ refused: "secret" });
			return "had another secret";
		}
		say({ proof: keys.proof("server") });
		return new ProvenConnection(connection, keys, "server");
	}

	/**
	 * The client's side: resolves with the connection when both sides have proved the secret, or with the reason why the server
	 * was not accepted. `patience`: milliseconds to wait for the greeting.
	 */
	static async introduce(
		connection: LineConnection,
		secret: string | null,
		patience = answerTime,
	): Promise<ProvenConnection | Failure> {
		const first = await connection.receive(patience);
		if (first === undefined) return { kind: connection.closed ? "gone" : "silent" };
		const greeting = v.safeParse(greetingSchema, parse(first));
		if (!greeting.success) return { kind: "stranger" };
		const { protocol: version, challenge } = greeting.output;
		if (version !== protocol) return { kind: "version", version };
		if (!v.is(hash, challenge)) return { kind: "stranger" };
		// The server's socket has an owner in the kernel's tables only once it has been accepted, which the greeting shows.
		if (secret === null && !connection.isOwnUser()) return { kind: "owner" };
		const own = randomBytes(32).toString("hex");
		const keys = new Keys(secret, challenge, own);
		connection.send(JSON.stringify({ challenge: own, proof: keys.proof("client") }));
		const second = await connection.receive(answerTime);
		if (second === undefined) return { kind: connection.closed ? "gone" : "silent" };
		const answer = v.safeParse(answerSchema, parse(second));
		if (!answer.success) return { kind: "secret" };
		if ("refused" in answer.output) return { kind: answer.output.refused === "owner" ? "owner" : "refused" };
		if (!equal(keys.proof("server"), answer.output.proof)) return { kind: "secret" };
		return new ProvenConnection(connection, keys, "client");
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

	/** The next value; undefined when no value came in time, or the connection has ended, also for a wrong tag. */
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
