/** Parameters of the router: two matrices for each axis, the same on every rank (docs/spec/elastic.md §3, §15). */
import type { Initialisation, ParameterSpec } from "../../../models/parameter-spec.ts";
import { type Axis, rowsOf } from "../axes.ts";
import type { ElasticConfig } from "../config.ts";

export const routerPrefix = "elastic_router.";

/** Name of an axis's first (0) or second (2) matrix. */
export function gateName({ name }: Pick<Axis, "name">, layer: 0 | 2): string {
	return `${routerPrefix}gate_${name}.${layer}.weight`;
}

export function routerParameters({ axes, budgets, router }: ElasticConfig): ParameterSpec[] {
	const initialisation: Initialisation = { kind: "normal", standardDeviation: router.standardDeviation };
	const common = { initialisation, shard: { kind: "replicated" }, alwaysF32: true } as const;
	return axes.flatMap((axis) => [
		{ ...common, name: gateName(axis, 0), shape: [router.width, budgets.length] },
		{ ...common, name: gateName(axis, 2), shape: [rowsOf(axis) * axis.sizes.length, router.width] },
	]);
}
