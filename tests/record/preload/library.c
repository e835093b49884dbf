/* Stands for a ggml of which nothing can be recorded: counts its calls. */
static int calls;

int ggml_backend_sched_graph_compute_async(void * sched, void * graph) {
    (void) sched;
    (void) graph;
    return ++calls, 0;
}

int library_calls(void) { return calls; }
