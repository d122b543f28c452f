package rpc

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// forwardedKey is the metadata key of a call that a server has forwarded. Its value is not used.
const forwardedKey = "torchft-forwarded"

// Forward makes the call that a handler has received at another server, with the same metadata, deadline and
// request. The answer stays encoded.
func Forward(
	ctx context.Context, conn grpc.ClientConnInterface, method string, request any,
) (answer Encoded, err error) {
	md, _ := metadata.FromIncomingContext(ctx)
	md = md.Copy()
	for key := range md {
		if key != jobKey && key != "traceparent" {
			md.Delete(key) // gRPC's own, and the token: this server has its own
		}
	}
	md.Set(forwardedKey, "1")
	err = conn.Invoke(metadata.NewOutgoingContext(ctx, md), method, request, &answer,
		grpc.ForceCodecV2(newCodec()))
	return answer, err
}

// IsForwarded reports whether a server has forwarded this call.
func IsForwarded(ctx context.Context) bool {
	md, _ := metadata.FromIncomingContext(ctx)
	return len(md.Get(forwardedKey)) > 0
}
