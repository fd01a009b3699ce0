"""What an engine must not keep, checked after streams, aborts and interrupts."""


def check_is_empty(llm):
    """No request, sequence, block or request slot is left."""
    while llm._in_flight:  # a surplus launch
        llm.step()
    assert llm.is_finished()
    outputs = llm._outputs
    assert not outputs.unfinished and not outputs._requests and not outputs._processors and not outputs.num_not_queued
    assert not llm._added.unfinished and not llm._added.num_queued
    scheduler, blocks = llm.scheduler, llm.scheduler.block_manager
    assert blocks.num_available == llm.model_runner.num_kvcache_blocks
    assert all(block.ref_count == 0 for block in blocks.blocks)
    assert sorted(scheduler.table.free_req_indices) == list(range(llm.config.max_num_seqs))
    assert not scheduler._seqs
    assert scheduler._num_stopping.sum() == len(scheduler.eos_token_ids) + 1  # and the mark of no token
    assert scheduler.num_in_flight == len(scheduler.running_req_indices) == 0


def finish(llm):
    """{request id: token ids} of the requests of ``add_request``."""
    finished = {}
    while not llm.is_finished():
        finished.update(llm.step()[0])
    return finished
