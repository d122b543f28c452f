package pyapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/torchft/torchft/go/keeper"
	"github.com/torchft/torchft/go/pyapi/ops"
)

// KeeperStart starts a keeper in a process that does nothing else; the result is a handle for Address and
// ReleaseStart. While another keeper runs, it fails as after a timeout: it has waited for the lock. writer is
// a JSON list of strings: the command that writes slots to disk. A keeper that ends by itself sends SIGTERM
// to its process.
func KeeperStart(root, bind, hostname, writer string, keepUs int64) (op int64, err error) {
	defer ops.Guard(&err)
	cfg := keeper.Config{Root: root, Bind: bind, Hostname: hostname, Keep: micros(keepUs),
		OnEnd: func() { _ = syscall.Kill(os.Getpid(), syscall.SIGTERM) }} // fails only if there is no process
	if err := json.Unmarshal([]byte(writer), &cfg.Writer); err != nil {
		return 0, fmt.Errorf("writer: %w", err)
	}
	if err := cfg.Validate(); err != nil {
		return 0, ops.As(ops.Value, err)
	}
	return ops.Start(bindTimeout, func(context.Context) (any, error) {
		k, err := keeper.New(cfg)
		if _, ok := errors.AsType[*keeper.RunningError](err); ok {
			return nil, ops.As(ops.Timeout, err)
		}
		if err != nil {
			return nil, err
		}
		return ops.NewBusyServer(k), nil
	}), nil
}

// KeeperList returns what is held below a root as JSON, as a keeper tells it.
func KeeperList(root string) (list string, err error) {
	defer ops.Guard(&err)
	held, err := keeper.List(root)
	if err != nil {
		return "", err
	}
	text, err := json.Marshal(held)
	return string(text), err
}
