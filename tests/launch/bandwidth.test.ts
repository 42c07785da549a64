/** Bandwidth between hosts: its measurement, also over a throttled link and without the secret, and the schedule of pairs. */
import { expect, test } from "bun:test";
import { connect, createServer } from "node:net";
import { ByteSink, measureRate, pairsInRounds } from "../../src/launch/bandwidth.ts";

const here = ["127.0.0.1"];

/** A proxy to `port` that forwards `bytes` a second. Returns its own port. */
async function slowWay(port: number, bytes: number): Promise<{ port: number } & Disposable> {
	const server = createServer((near) => {
		const far = connect({ host: here[0]!, port });
		far.pipe(near);
		let due = performance.now();
		near.on("data", (data: Buffer) => {
			near.pause();
			due = Math.max(due, performance.now()) + (1000 * data.length) / bytes;
			setTimeout(() => {
				far.write(data);
				near.resume();
			}, due - performance.now());
		});
		near.on("close", () => far.destroy());
		for (const socket of [near, far]) socket.on("error", () => {});
	});
	await new Promise<void>((resolve) => server.listen(0, here[0], () => resolve()));
	return { port: (server.address() as { port: number }).port, [Symbol.dispose]: () => server.close() };
}

test("a throttled link is measured at its rate, an open one far above", async () => {
	using sink = await ByteSink.open("secret");
	using throttled = await slowWay(sink.port, 8e6);
	// The fastest of five counts: the processor may be busy with other work.
	const fastest = async (port: number, enough: number) => {
		let rate = 0;
		for (let i = 0; i < 5 && rate < enough; i++) {
			rate = Math.max(rate, await measureRate({ addresses: here, port }, "secret"));
		}
		return rate;
	};
	expect(await fastest(sink.port, 500e6)).toBeGreaterThan(100e6);
	expect(await fastest(throttled.port, 7e6)).toBeWithin(4e6, 9e6);
}, 20_000);

test("the first address that answers is used; no answer and a wrong secret are failures", async () => {
	using sink = await ByteSink.open("secret");
	const unused = await ByteSink.open("secret");
	unused[Symbol.dispose]();
	expect(await measureRate({ addresses: ["::1", ...here], port: sink.port }, "secret")).toBeGreaterThan(1e6);
	await expect(measureRate({ addresses: here, port: unused.port }, "secret")).rejects.toThrow();
	await expect(measureRate({ addresses: here, port: sink.port }, "guess")).rejects.toThrow();
}, 20_000);

test("the schedule has every pair once, and no host twice in a round", () => {
	for (const count of [1, 2, 3, 4, 7, 8, 33]) {
		const rounds = pairsInRounds(count);
		for (const round of rounds) expect(new Set(round.flat()).size).toBe(2 * round.length);
		const pairs = rounds.flat().map((pair) => pair.toSorted((a, b) => a - b).join("-"));
		expect(new Set(pairs).size).toBe(pairs.length);
		expect(pairs.length).toBe((count * (count - 1)) / 2);
		expect(rounds.length).toBeLessThanOrEqual(Math.max(1, count));
	}
});
