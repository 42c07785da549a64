/**
 * `mimo verify`: the reference in this process, then every layout as a launch of its own, whose ranks compare themselves
 * with the reference's folder.
 */
import { randomUUID } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { World } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { systemReason } from "../../system/system-errors.ts";
import { type LayoutResult, runLayout } from "./layout-run.ts";
import { type PolicyReport, type PolicyResult, runPolicy } from "./policy.ts";
import { makeReference, type Reference, StoredReference } from "./reference.ts";
import type { Plan } from "./samples.ts";
import type { Subject } from "./subject.ts";
import { judge, type LayoutReport } from "./verdict.ts";

/** Removes its argument when its input ends: when the process that holds the other end has ended, however it did. */
const removeAtEnd = 'read -r _; exec rm -rf -- "$1"';

/**
 * A reference and the results of layouts, as files for the ranks. A folder that was not given is gone when disposed, or
 * when this process ends without: a signal does not wait for the event loop, which computing blocks.
 */
export class VerifyFolder implements Disposable {
	readonly path: string;
	/** Removes a folder that was not given. */
	readonly #remover: Bun.Subprocess<"pipe", "ignore", "ignore"> | null = null;

	constructor(given?: string) {
		this.path = given ?? join(tmpdir(), `mimo-verify-${randomUUID()}`);
		if (given !== undefined) {
			mkdirSync(given, { recursive: true });
			return;
		}
		const command = ["sh", "-c", removeAtEnd, "sh", this.path];
		// Signals for the whole process group, such as a terminal's, leave it alone.
		this.#remover = Bun.spawn(command, { stdin: "pipe", stdout: "ignore", stderr: "ignore", detached: true });
		this.#remover.unref();
		// Made after the process that removes it, so that a signal at any moment leaves no folder.
		try {
			mkdirSync(this.path, { mode: 0o700 });
		} catch (error) {
			throw new UserError(
				`The folder for temporary files, ${tmpdir()}, cannot be written: ${systemReason(error)}; TMPDIR names another.`,
			);
		}
	}

	[Symbol.dispose](): void {
		if (this.#remover === null) return;
		rmSync(this.path, { recursive: true, force: true });
		void this.#remover.stdin.end();
	}
}

/** Results that a layout's ranks leave behind. */
function resultFile(folder: string, layout: string): string {
	return join(folder, `${layout.replaceAll("+", "_")}.json`);
}

/** For the ranks of a layout: compares with the reference in `folder`, where the last rank writes the result. */
export async function verifyOnRank(world: World, plan: Plan, subject: Subject, folder: string): Promise<void> {
	using reference = new StoredReference(folder);
	const result = await runLayout(world, plan, subject, reference);
	// The last rank has the language model, and so routers and their losses.
	if (world.rank === plan.topology.worldSize - 1) writeFileSync(resultFile(folder, plan.name), JSON.stringify(result));
}

/** Runs a layout for the values that the participation correction changes; a rank of the language model writes the result. */
export async function policyOnRank(world: World, plan: Plan, subject: Subject, folder: string): Promise<void> {
	const result = await runPolicy(world, plan, subject);
	if (world.rank === plan.topology.worldSize - 1) writeFileSync(resultFile(folder, plan.name), JSON.stringify(result));
}

export async function comparePolicies(
	options: Pick<VerifyOptions, "subject" | "plans" | "folder" | "alone" | "launch">,
): Promise<PolicyReport[]> {
	const { subject, plans, folder, alone, launch } = options;
	const reports: PolicyReport[] = [];
	for (const plan of plans) {
		const single = plan.topology.worldSize === 1;
		const exitCode = single ? await policyOnRank(alone, plan, subject, folder).then(() => 0) : await launch(plan);
		reports.push({ layout: plan.name, result: readResult<PolicyResult>(folder, plan, exitCode) });
	}
	return reports;
}

function readResult<Result>(folder: string, { name }: Plan, exitCode: number): Result | null {
	const file = resultFile(folder, name);
	return exitCode === 0 && existsSync(file) ? (JSON.parse(readFileSync(file, "utf8")) as Result) : null;
}

export interface VerifyOptions {
	readonly subject: Subject;
	readonly plans: readonly Plan[];
	readonly folder: string;
	readonly tolerance: number;
	/** This process, alone: for the reference and for layout 1. */
	readonly alone: World;
	/** Runs verifyOnRank on the ranks of a layout; resolves with the exit code. */
	readonly launch: (plan: Plan) => Promise<number>;
	readonly onReference?: (reference: Reference) => void;
}

export async function verify(options: VerifyOptions): Promise<{ reference: Reference; reports: LayoutReport[] }> {
	const { subject, plans, folder, alone } = options;
	const reference = await makeReference(alone, subject, folder);
	options.onReference?.(reference);
	const reports: LayoutReport[] = [];
	for (const plan of plans) {
		const exitCode =
			plan.topology.worldSize === 1
				? await verifyOnRank(alone, plan, subject, folder).then(() => 0)
				: await options.launch(plan);
		reports.push(reportOf(plan, exitCode, reference, options));
	}
	return { reference, reports };
}

/** Judges what verifyOnRank has left in a folder whose reference was made earlier. */
export function reportOfRanks(
	plan: Plan,
	folder: string,
	tolerance: number,
): { readonly reference: Reference; readonly report: LayoutReport } {
	using stored = new StoredReference(folder);
	const { description: reference } = stored;
	return { reference, report: reportOf(plan, 0, reference, { folder, tolerance }) };
}

function reportOf(
	plan: Plan,
	exitCode: number,
	reference: Reference,
	options: Pick<VerifyOptions, "folder" | "tolerance">,
): LayoutReport {
	const { name: layout, microBatchSize, microbatches } = plan;
	const about = { layout, microBatchSize, microbatches };
	const result = readResult<LayoutResult>(options.folder, plan, exitCode);
	if (result === null) {
		return { ...about, result: null, verdict: null, failures: [`its run ended with exit code ${exitCode}`] };
	}
	const verdict = judge(result, reference, options.tolerance);
	return { ...about, result, verdict, failures: verdict.failures };
}
