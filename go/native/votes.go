package main

/*
#include <stdint.h>
#include "event.h"
*/
import "C"

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/torchft/torchft/go/pyapi/ops"
	"github.com/torchft/torchft/go/rankclient"
)

// message is a vote that csrc/vote.c writes into the pipe.
type message struct {
	call      *C.tft_call
	client    int64 // handle of a rankclient.Client; 0: cancel the call
	groupRank int64
	step      int64
	vote      int64
	timeoutUs int64
}

const messageSize = int(unsafe.Sizeof(message{}))

// votes are those in progress.
var votes = struct {
	sync.Mutex
	cancel map[*C.tft_call]context.CancelFunc
}{cancel: map[*C.tft_call]context.CancelFunc{}}

// tft_votes_open creates the pipe for votes, and returns its write end, or -1.
//
//export tft_votes_open
func tft_votes_open() C.int {
	var ends [2]int
	if err := syscall.Pipe2(ends[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
		slog.Error("torchft: no pipe could be made", "error", err)
		return -1
	}
	go readVotes(os.NewFile(uintptr(ends[0]), "torchft votes"))
	return C.int(ends[1])
}

// readVotes serves votes until the process ends. csrc/vote.c alone writes to the pipe, whole messages.
func readVotes(pipe *os.File) {
	var messages [16]message
	buffer := unsafe.Slice((*byte)(unsafe.Pointer(&messages)), len(messages)*messageSize)
	for {
		n, err := pipe.Read(buffer)
		if err != nil {
			slog.Error("torchft: votes cannot be read", "error", err)
			return
		}
		for _, m := range messages[:n/messageSize] {
			m.serve()
		}
	}
}

// serve begins a vote on a goroutine of its own, or cancels one.
func (m message) serve() {
	votes.Lock()
	defer votes.Unlock()
	if m.client == 0 {
		if cancel := votes.cancel[m.call]; cancel != nil {
			cancel()
		}
		return
	}
	timeout := time.Duration(m.timeoutUs) * time.Microsecond
	votes.cancel[m.call] = ops.Run(timeout, m.cast, func(decision any, err error) {
		votes.Lock()
		delete(votes.cancel, m.call) // before the end: another call may get its address
		votes.Unlock()
		state, number, text, length := toC(decision, err)
		C.tft_call_end(m.call, state, number, text, length)
	})
}

// cast votes, and waits for the group's decision. The result is 0: do not commit, 1: commit, or 2: commit,
// and begin the next step without a quorum round.
func (m message) cast(ctx context.Context) (any, error) {
	client, err := ops.Get[*rankclient.Client](m.client)
	if err != nil {
		return nil, err
	}
	d, err := client.ShouldCommit(ctx, m.groupRank, m.step, m.vote != 0)
	decision := int64(0)
	if d.GetShouldCommit() {
		decision++
	}
	if d.GetStands() {
		decision++
	}
	return decision, ops.CallFailed(err)
}
