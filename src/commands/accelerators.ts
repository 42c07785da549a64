/** Findings about a host's GPUs, from nvidia-smi. */
import { counted } from "../system/counted.ts";
import type { Finding } from "./machine.ts";

const queries = [
	"index",
	"name",
	"driver_version",
	"memory.total",
	"memory.used",
	"clocks.sm",
	"clocks.max.sm",
	"clocks_throttle_reasons.active",
	"ecc.errors.uncorrected.volatile.total",
] as const;

/** Bits of clocks_throttle_reasons.active that are faults; the others, such as idle, are not. */
const throttled = { "hardware slowdown": 0x8, "software thermal slowdown": 0x20, heat: 0x40, "power brake": 0x80 };

/** Output of `nvidia-smi`; null where it is absent or fails. */
export type DriverTool = (args: readonly string[]) => string | null;

const nvidiaSmi: DriverTool = (args) => {
	if (!Bun.which("nvidia-smi")) return null;
	const { stdout, success } = Bun.spawnSync(["nvidia-smi", ...args], {
		stdout: "pipe",
		stderr: "ignore",
		timeout: 20_000,
	});
	return success ? stdout.toString() : null;
};

/** A finding for the driver, one for all GPUs, and one for each problem. */
export function inspectAccelerators(tool: DriverTool = nvidiaSmi): Finding[] {
	const table = tool([`--query-gpu=${queries.join(",")}`, "--format=csv,noheader,nounits"]);
	if (table === null) return [{ name: "GPUs", value: "none: the NVIDIA driver does not answer", state: "information" }];
	const gpus = table
		.trim()
		.split("\n")
		.map((line) => line.split(",").map((cell) => cell.trim()));
	const names = new Map<string, number>();
	for (const [, name] of gpus) names.set(name!, (names.get(name!) ?? 0) + 1);
	const kinds = [...names].map(([name, count]) => `${count} × ${name}`).join(", ");
	const findings: Finding[] = [
		{ name: "driver", value: `NVIDIA ${gpus[0]?.[2]}`, state: "good" },
		{
			name: "GPUs",
			value: kinds,
			state: names.size === 1 ? "good" : "warning",
			...(names.size === 1 ? {} : { advice: "every step waits for the slowest GPU" }),
			details: { gpus: gpus.map((cells) => Object.fromEntries(queries.map((query, i) => [query, cells[i]]))) },
		},
	];
	for (const [index, , , , used, clock, fastest, reasons, errors] of gpus) {
		const bits = Number(reasons);
		const active = Object.entries(throttled).flatMap(([reason, bit]) => ((bits & bit) === 0 ? [] : [reason]));
		if (active.length > 0) {
			const value = `throttled (${active.join(", ")}): ${clock} of ${fastest} MHz`;
			findings.push({ name: `GPU ${index}`, value, state: "warning", advice: "check cooling and power" });
		}
		if (Number(errors) > 0) {
			const value = counted(Number(errors), "uncorrected memory error");
			findings.push({ name: `GPU ${index}`, value, state: "problem", advice: "reset or replace it" });
		}
		if (Number(used) > 1024) {
			const value = `${used} MiB are in use`;
			findings.push({ name: `GPU ${index}`, value, state: "warning", advice: "another program runs on it" });
		}
	}
	return gpus.length > 1 ? [...findings, peerAccess(tool, gpus.length)] : findings;
}

/** Whether every GPU can read every other's memory. */
function peerAccess(tool: DriverTool, count: number): Finding {
	const matrix = tool(["topo", "-p2p", "r"]);
	if (matrix === null) return { name: "peer access", value: "unknown", state: "information" };
	const rows = matrix.split("\n").filter((line) => /^\s*GPU\d+\s+(X|[A-Z]+)/.test(line) && !/GPU0\s+GPU1/.test(line));
	const missing = rows.flatMap((line, from) =>
		line
			.trim()
			.split(/\s+/)
			.slice(1, count + 1)
			.flatMap((cell, to) => (cell === "OK" || cell === "X" ? [] : [`${from}→${to} ${cell}`])),
	);
	if (missing.length === 0) return { name: "peer access", value: `between all ${count} GPUs`, state: "good" };
	return {
		name: "peer access",
		value: `not between ${missing.slice(0, 4).join(", ")}${missing.length > 4 ? " …" : ""}`,
		state: "warning",
		advice: "collectives inside this host go through its memory",
	};
}
