//go:build !linux

package rpc

import (
	"net"
	"time"
)

func setUserTimeout(*net.TCPConn, time.Duration) {}
