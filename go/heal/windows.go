package heal

import (
	"errors"
	"fmt"
	"sync"
)

// windows organizes the transfer to devices. A window consists of consecutive blocks, which are fetched into
// a stage, that is, memory of the host. When all of them have arrived and been checked, Python copies them to
// the device, and provides the stage again for the next window. With two stages the network and the device
// are busy at the same time. Blocks with host memory only belong to no window: they are fetched directly into
// that memory.
type windows struct {
	layout *Layout
	away   map[int]int64
	blocks int // number of blocks in a window

	mu     sync.Mutex
	next   int // number of the next window
	stages []*stage
}

type stage struct {
	memory []byte
	window int
	left   int // blocks that have not arrived yet
}

func newWindows(layout *Layout, away map[int]int64, blocks int64) (*windows, error) {
	if len(away) > 0 && blocks < 1 {
		return nil, fmt.Errorf("windows of %d blocks: allowed are 1 and more", blocks)
	}
	return &windows{layout: layout, away: away, blocks: int(min(max(blocks, 1), int64(layout.Blocks())))}, nil
}

// staged reports whether a block is fetched into a stage, because some of its bytes belong to a device.
func (w *windows) staged(block int) bool {
	if len(w.away) == 0 {
		return false
	}
	for _, span := range w.layout.Spans(block, nil) {
		if _, away := w.away[span.Region]; away {
			return true
		}
	}
	return false
}

// of returns the staged blocks of a window.
func (w *windows) of(window int) (blocks []int) {
	end := min((window+1)*w.blocks, w.layout.Blocks())
	for block := window * w.blocks; block < end; block++ {
		if w.staged(block) {
			blocks = append(blocks, block)
		}
	}
	return blocks
}

var errStageInUse = errors.New("the stage is in use")

// open assigns a stage to the next window, and returns the window's number and the blocks to fetch. The
// number is -1 if no window is left.
func (w *windows) open(memory []byte) (window int, blocks []int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if need := int64(w.blocks) * w.layout.BlockSize; int64(len(memory)) < need {
		return 0, nil, fmt.Errorf("a stage of %d bytes for windows of %d", len(memory), need)
	}
	for i, s := range w.stages {
		if &s.memory[0] == &memory[0] {
			if s.left > 0 {
				return 0, nil, errStageInUse
			}
			w.stages = append(w.stages[:i], w.stages[i+1:]...)
			break
		}
	}
	for ; w.next*w.blocks < w.layout.Blocks(); w.next++ {
		if blocks = w.of(w.next); len(blocks) > 0 {
			w.stages = append(w.stages, &stage{memory, w.next, len(blocks)})
			w.next++
			return w.next - 1, blocks, nil
		}
	}
	return -1, nil, nil
}

// place returns the part of a stage for bytes that belong to a device. Their window must be open.
func (w *windows) place(block int, span Span) []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.find(block)
	at := w.layout.starts[span.Region] + span.Offset - int64(s.window*w.blocks)*w.layout.BlockSize
	return s.memory[at : at+span.Length]
}

// arrived records a block, and reports whether its window is full now.
func (w *windows) arrived(block int) bool {
	if !w.staged(block) {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.find(block)
	s.left--
	return s.left == 0
}

// full returns the windows that are ready to be copied to the device.
func (w *windows) full() []int {
	w.mu.Lock()
	defer w.mu.Unlock()
	full := []int{}
	for _, s := range w.stages {
		if s.left == 0 {
			full = append(full, s.window)
		}
	}
	return full
}

func (w *windows) find(block int) *stage {
	for _, s := range w.stages {
		if s.window == block/w.blocks {
			return s
		}
	}
	panic(fmt.Sprintf("block %d was fetched before its window was open", block))
}
