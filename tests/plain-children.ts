/** A preload of tests (run.ts): programs that they start compile no function with the optimising compilers. */
process.env.BUN_JSC_useDFGJIT = "0";
